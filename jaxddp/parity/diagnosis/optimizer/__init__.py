"""Diagnosis of updates: the optimizer replayed with faults."""
