"""port.py with another flax_optimizer.

    python -m jaxddp.parity examples/ports/recommender/broken.py --steps 3

It trains, and its loss falls. Run the check before you read on.
"""

import optax
from port import (  # noqa: F401
    LR,
    WEIGHT_DECAY,
    batch,
    flax_loss,
    flax_model,
    names,
    torch_loss,
    torch_model,
    torch_optimizer,
)

flax_optimizer = optax.adamw(LR, weight_decay=WEIGHT_DECAY)
