"""The classifier in flax.linen."""

import optax
from flax import linen as nn

LR = 1e-3


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(12, name="inner")(x)
        x = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(x)
        x = nn.gelu(x, approximate=False)
        return nn.Dense(4, name="outer")(x)


def jax_model():
    return Classifier()


def jax_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.mean()


jax_optimizer = optax.adam(LR)
