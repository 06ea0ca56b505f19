"""transformer_encoder.py with another jax_loss that looks just as plausible.

    jaxddp check examples/ports/transformer_encoder_broken.py

It trains, and its loss falls. Run the check before you read on.
"""

from collections.abc import Mapping

import jax
from transformer_encoder import (  # noqa: F401
    FlaxTagger,
    batch,
    jax_model,
    jax_optimizer,
    loss_normalization,
    names,
    torch_loss,
    torch_model,
    torch_optimizer,
    torch_scheduler,
)
from transformer_encoder import jax_loss as loss_per_word


def jax_loss(model: FlaxTagger, sentences: Mapping[str, jax.Array]) -> jax.Array:
    losses, is_word = loss_per_word(model, sentences)
    return (losses * is_word).sum() / is_word.sum()
