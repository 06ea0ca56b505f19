"""Mixed precision with the policy of `torch.autocast`.

Matrix products and convolutions cast their inputs and weights to 16 bits and return 16 bits; BatchNorm statistics and
the loss are computed in float32. The stored weights, their gradients and the optimizer state stay in float32.

Source: pytorch.org/docs/stable/amp.html
"""

from flax import nnx
from jax import numpy as jnp

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
PRODUCTS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.LoRA)


def autocast(model: nnx.Module, amp: str) -> None:
    """Make the model's matrix products and convolutions compute in 16 bits; its weights keep their dtype.

    A layer with an explicit `dtype` keeps it, like a layer under `torch.autocast(enabled=False)`.
    A matrix product outside of flax layers has the dtype of its operands.

    Args:
        model: module, changed in place.
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
