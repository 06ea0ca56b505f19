"""Predict a run on GPUs that this machine lacks: `jaxddp plan`.

    options -> workload -> program compiled by XLA -> schedule -> roofline and links -> report, picture

The step is the trainer's, compiled for the GPUs; what it computes, sends and keeps in memory is read from the
compiled program. Times are a model's: `jaxddp.config.hardware` has its constants.
"""
