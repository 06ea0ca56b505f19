"""Torch side of a parity check: ranks in child processes that record each stage. Imports no jax."""
