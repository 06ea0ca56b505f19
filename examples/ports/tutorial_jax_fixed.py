# mypy: allow-untyped-defs
"""The JAX script of docs/check_your_port.md after the patch and one edit by hand.

python tutorial_jax_fixed.py
"""

import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

from jaxddp.data import digits


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs, epsilon=1e-05)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def schedule(step):
    return 1e-3 * jnp.minimum(1, (step + 1) / 100)


optimizer = optax.adamw(schedule, weight_decay=0.01)


@nnx.jit
def train_step(model, state, batch):
    loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
    state.update(model, gradients)
    return loss


if __name__ == "__main__":
    model, data = Classifier(nnx.Rngs(0)), digits()
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for epoch in range(5):
        order = np.random.default_rng(epoch).permutation(len(data["y"]))
        for rows in order[: 28 * 64].reshape(28, 64):
            loss = train_step(model, state, {name: array[rows] for name, array in data.items()})
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
