"""Optimizer step of a replica: local gradients, comm hook, mean over replicas, clipping, optimizer update, buffers."""
