"""Mixed precision: which layers compute in 16 bits, after the policy of `torch.autocast`.

Matrix products and convolutions do, with inputs and weights cast on the way; what comes of them goes on in
16 bits, but for a BatchNorm's statistics and the loss, which are taken in float32. The weights themselves, their
gradients and the optimizer stay in float32.

Source: pytorch.org/docs/stable/amp.html
"""

from flax import nnx
from jax import numpy as jnp

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
PRODUCTS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.LoRA)


def autocast(model: nnx.Module, amp: str) -> None:
    """Let the model's matrix products and convolutions compute in 16 bits; its weights stay as they are.

    A layer whose `dtype` somebody has set keeps it, as one in a nested `torch.autocast(enabled=False)` does.
    A product that a model makes by itself, without a layer, has the dtype of what it is given.

    Args:
        model: is changed.
        amp: "none", "bf16" or "fp16".

    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> autocast(layer, "bf16")
    >>> str(layer(jnp.ones((1, 2))).dtype), str(layer.kernel[...].dtype)
    ('bfloat16', 'float32')
    """
    if amp == "none":
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PRODUCTS) and module.dtype is None:
            module.dtype = DTYPES[amp]
