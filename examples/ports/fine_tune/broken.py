"""The port of a BERT classifier's fine-tuning with one mistake in jax_optimizer.

    jaxddp check examples/ports/fine_tune/broken.py

It trains, and its loss falls. Run the check before you read on.
"""

import flax_fine_tune
from port import *  # noqa: F403
from port import LR, STEPS, WEIGHT_DECAY

jax_optimizer = flax_fine_tune.make_optimizer(LR, STEPS, WEIGHT_DECAY, decays=lambda path, p: p.ndim > 1)
