"""Correct ports, and faults planted in their JAX half; shares only the names of faults with the diagnosis."""
