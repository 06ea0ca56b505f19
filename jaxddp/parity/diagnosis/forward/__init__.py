"""Diagnosis of losses, local gradients and buffers: the torch loss replayed with changed calls."""
