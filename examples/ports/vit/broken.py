"""port.py with another flax_optimizer, whose mask is the one that most programs have.

    python -m jaxddp.parity examples/ports/vit/broken.py --steps 3

It trains, and its loss falls. Run the check before you read on.
"""

import jax
import optax
from port import (  # noqa: F401
    WEIGHT_DECAY,
    batch,
    configure_optimizers,
    flax_loss,
    flax_model,
    names,
    schedule,
    torch_loss,
    torch_model,
)


def decayed(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


flax_optimizer = optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=decayed)
