"""Schedule-free AdamW of Optax."""

import optax
import optax.contrib
from flax import nnx

LR, BETA1, BETA2, EPS, DECAY = 2e-3, 0.9, 0.999, 1e-8, 0.1


def jax_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(6, 12, rngs=rngs), nnx.relu, nnx.Linear(12, 4, rngs=rngs))


def jax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


jax_optimizer = optax.contrib.schedule_free_adamw(LR, b1=BETA1, b2=BETA2, eps=EPS, weight_decay=DECAY)
