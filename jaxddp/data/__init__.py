"""Data sets, the sampler, and torch's random numbers. Framework-free."""
