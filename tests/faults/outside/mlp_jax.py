"""A regressor in flax.nnx: an MLP with a gated residual branch, and SGD whose rate falls along a cosine."""

import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.state import TrainState

EXAMPLES, BATCH, REPLICAS = 64, 8, 2
LR, MOMENTUM, STEPS = 0.1, 0.9, 10
STEPS_PER_EPOCH = EXAMPLES // (BATCH * REPLICAS)


class Regressor(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs)
        self.gate = nnx.Linear(8, 8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = (x - 0.5) / 0.25
        x = jax.nn.leaky_relu(self.fc1(x), 0.2)
        h = self.norm(x)
        x = x + jax.nn.silu(self.gate(h)) * self.up(h)
        return 0.5 * self.head(x)


def jax_model():
    return Regressor(nnx.Rngs(0))


def jax_loss(model, batch):
    return optax.huber_loss(model(batch["x"]), batch["y"], delta=0.5).mean()


def rate(count):
    return LR * 0.5 * (1 + jnp.cos(jnp.pi * count / STEPS))


jax_optimizer = optax.chain(optax.trace(MOMENTUM), optax.scale_by_learning_rate(rate))


def jax_step(loss, optimizer, state, batch):
    (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    averaged = jax.lax.pmean(gradients, "replica")
    opt_state = state.opt_state
    updates, opt_state = optimizer.update(averaged, opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    shown = {"local_loss": value, "local_gradients": gradients, "gradients": averaged}
    return TrainState(state.step + 1, params, buffers, opt_state), shown


def dataset():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (EXAMPLES, 6))
    return x, np.stack([x[:, 0] - x[:, 1], 4 * x[:, 2] * x[:, 3], 3 * np.sin(9 * x[:, 4])], axis=1)


def jax_batch(step, rank):
    x, y = dataset()
    epoch, at = divmod(step, STEPS_PER_EPOCH)
    order = np.random.default_rng(epoch).permutation(EXAMPLES)
    chosen = order[rank::REPLICAS][at * BATCH : (at + 1) * BATCH]
    return {"ids": chosen, "x": x[chosen], "y": y[chosen]}
