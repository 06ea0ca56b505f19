"""Hooks that inspect, change and log gradients, before and after their mean over the replicas.

    python -m examples.gradient_hooks

torch uses `Tensor.register_hook` under DistributedDataParallel, JAX `jaxddp.step.gradient_hooks`.
"""

from examples.entry import Example

EXAMPLE = Example(
    name="Gradient hooks",
    seed="001",
    claim=(
        "Hooks inspect and change gradients during the backward pass, and DDP's own hooks average them over the "
        "processes."
    ),
    verdict="True. A hook before the mean differs from the same hook after it, and JAX averages without hooks.",
    command="python -m examples.gradient_hooks",
)
