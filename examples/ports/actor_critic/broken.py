"""port.py with another jax_step.

    jaxddp check examples/ports/actor_critic/broken.py --steps 3

It trains, and its losses fall. Run the check before you read on.
"""

from flax_actor_critic import average, train_step
from port import (  # noqa: F401
    SAC_STEP,
    batch,
    configure_optimizers,
    jax_model,
    jax_optimizer,
    names,
    no_twin,
    torch_model,
    torch_step,
)


def jax_step(optimizers, state, data):
    reduce = {"critic": average, "actor": lambda gradients: gradients}
    return train_step(SAC_STEP, optimizers, state, data, reduce)
