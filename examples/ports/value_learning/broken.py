"""port.py with another flax_step.

    python -m jaxddp.parity examples/ports/value_learning/broken.py --steps 3

It trains, and its loss falls. Run the check before you read on.
"""

from flax_value_learning import train_step
from port import (  # noqa: F401
    EMA_DECAY,
    GAMMA,
    batch,
    configure_optimizers,
    flax_model,
    flax_optimizer,
    names,
    torch_clip_grad_norm,
    torch_model,
    torch_step,
)

POLYAK = 0.995


def flax_step(networks, optimizer, data):
    return train_step(networks, optimizer, data, GAMMA, POLYAK, EMA_DECAY)
