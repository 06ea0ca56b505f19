"""Hooks that inspect, change and log gradients, before and after their mean over the replicas.

    python -m examples.gradient_hooks

torch uses `Tensor.register_hook` under DistributedDataParallel, JAX `jaxddp.step.gradient_hooks`.
"""
