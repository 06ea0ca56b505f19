"""gpt.py with another flax_model that starts from the same weights and the same loss, to the last digit.

    python -m jaxddp.parity examples/ports/gpt_broken.py

It trains, and its loss falls. Run the check before you read on.
"""

import jax
from flax import nnx
from gpt import (  # noqa: F401
    TOKENS,
    WIDTH,
    FlaxGPT,
    accumulation_steps,
    batch,
    clip_grad_norm,
    flax_loss,
    flax_optimizer,
    torch_loss,
    torch_model,
    torch_optimizer,
    torch_scheduler,
)


class GPT(FlaxGPT):
    """`FlaxGPT` with a separate layer for the logits."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, use_bias=False, rngs=rngs)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.head(x)


def flax_model() -> nnx.Module:
    return GPT(nnx.Rngs(0))
