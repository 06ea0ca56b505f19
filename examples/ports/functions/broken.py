"""The port of PyTorch's word-level language model with one mistake in jax_loss.

    jaxddp check examples/ports/functions/broken.py

It trains, and its loss falls. Run the check before you read on.
"""

import jax_functions
import optax
from port import *  # noqa: F403
from port import DROPOUT

KEEP = 1 - DROPOUT


def jax_loss(params, batch, key):
    words = batch["words"].T
    logits = jax_functions.logits(params, words[:-1], KEEP, key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[1:]).mean()
