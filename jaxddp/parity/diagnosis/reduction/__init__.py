"""Diagnosis of gradients: the reduction and the clipping replayed with faults."""
