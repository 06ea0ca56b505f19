"""Ports that are right, and faults planted in their JAX half; nothing of the diagnosis but its names."""
