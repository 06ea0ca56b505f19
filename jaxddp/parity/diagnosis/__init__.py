"""Diagnosis: the known fault that, planted in the reference, does what the port does."""
