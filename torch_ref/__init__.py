"""PyTorch mirror of jaxddp: the same models, data, flags and files, on torch's own parts."""
