"""One device, many devices, DDP: the same updates, and the learning rates that they need."""
