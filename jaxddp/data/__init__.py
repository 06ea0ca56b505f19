"""Datasets, sampler, micro-batches and torch's random numbers, without a framework."""
