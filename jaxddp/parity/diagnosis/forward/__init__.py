"""Diagnose losses, local gradients and buffers: replay the torch loss with changed calls."""
