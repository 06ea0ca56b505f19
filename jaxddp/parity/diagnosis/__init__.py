"""Diagnosis: find the known fault that, planted in the reference, reproduces what the port does."""
