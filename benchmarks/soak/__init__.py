"""Soak: a job that is killed every few minutes for hours, and what stays level; see `benchmarks.soak.__main__`."""
