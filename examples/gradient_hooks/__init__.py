"""Hooks that inspect, change and log gradients, before and after their mean over the replicas.

    python -m examples.gradient_hooks

In torch with `Tensor.register_hook` under DistributedDataParallel, in JAX with `jaxddp.step.gradient_hooks`.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Gradient hooks",
    seed="001",
    claim="Hooks see and change gradients in the backward pass, and DDP's own hooks average them over the processes.",
    verdict="True; what a hook does before the mean is another thing than after it, and JAX needs no hooks to average.",
    command="python -m examples.gradient_hooks",
)
