"""Data-parallel training in JAX with the semantics of PyTorch's DistributedDataParallel."""
