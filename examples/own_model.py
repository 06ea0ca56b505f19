"""A custom model and loss, data-parallel on all local GPUs or on CPU devices.

python examples/own_model.py
"""

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from jaxddp import DistributedDataParallel, Loader, Replicas, optim, prepare


class Curve(nnx.Module):
    """A network with one hidden layer that fits a curve."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(1, 32, rngs=rngs)
        self.outer = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.tanh(self.inner(x)))


def squared_error(model: Curve, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Compute one loss per example; jaxddp takes the mean over examples and replicas."""
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def main() -> float:
    """Train and return the mean squared error."""
    replicas = Replicas(prepare())
    x = np.linspace(-3, 3, 512, dtype=np.float32)
    data = {"x": x[:, None], "y": np.sin(x)}

    ddp = DistributedDataParallel(Curve(nnx.Rngs(0)), optim.adam(3e-2), squared_error, replicas=replicas)
    loader = Loader(data, replicas, global_batch_size=32)
    state = ddp.init()
    for epoch in range(100):
        for batches in loader.epoch(epoch):
            state, _ = ddp.steps(state, batches)
    ddp.verify(state)  # every replica holds the same bits

    error = ddp.evaluate(state, data)["loss"]
    at_one = ddp.module(state)(np.ones((1, 1)))[0, 0]  # an nnx module again
    print(f"{ddp.world_size} replicas   mean squared error {error:.6f}   sin(1) is about {at_one:.3f}")
    return error


if __name__ == "__main__":
    main()
