"""Make flax.nnx layers start at zero, for twins that get torch's weights: compiling random draws takes longest."""

from functools import partial

from flax import nnx

_zeros = nnx.initializers.zeros_init()
Linear = partial(nnx.Linear, kernel_init=_zeros)
Conv = partial(nnx.Conv, kernel_init=_zeros)
Embed = partial(nnx.Embed, embedding_init=_zeros)
