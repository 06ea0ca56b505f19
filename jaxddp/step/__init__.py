"""The replica step: local gradients, comm hook, mean over replicas, clipping, optimizer update, buffers."""
