"""The port of nanoGPT's character model with one mistake in jax_optimizer.

    jaxddp check examples/ports/decoder/broken.py

It trains, and its loss falls. Run the check before you read on.
"""

import jax
import optax
from port import *  # noqa: F403
from port import BETAS, DECAY_ITERS, LR, MIN_LR, WARMUP, WEIGHT_DECAY

jax_optimizer = optax.adamw(
    optax.warmup_cosine_decay_schedule(0.0, LR, WARMUP, DECAY_ITERS, MIN_LR),
    *BETAS,
    weight_decay=WEIGHT_DECAY,
    mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
)
