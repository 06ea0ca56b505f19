"""One optimizer step on each replica: local gradients, comm hook, mean over replicas, clipping, optimizer update, buffers."""
