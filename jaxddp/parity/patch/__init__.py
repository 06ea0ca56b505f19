"""Patches: edits of the user's JAX file that remove a difference, tried on the run and written as a unified diff."""
