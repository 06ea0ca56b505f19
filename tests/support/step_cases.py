"""A small model, examples dealt to replicas in micro-batches, and the distance of two results."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.loader import Loader
from jaxddp.nn import layers
from jaxddp.nn.losses import IGNORE_INDEX, Batch
from jaxddp.state import TrainState

FEATURES, TOKENS, CLASSES = 4, 3, 3

Arrays = dict[str, np.ndarray]


class Net(nnx.Module):
    """Two linear layers with nothing, a BatchNorm or dropout between them, for x (B, ..., FEATURES)."""

    def __init__(self, bn: str | None = None, dropout: float = 0.0):
        generator = Generator(0)
        self.fc1 = layers.Linear(FEATURES, 5, generator=generator)
        self.bn = None if bn is None else layers.BatchNorm(5, sync=bn == "sync")
        self.dropout = layers.dropout(dropout, seed=0)
        self.fc2 = layers.Linear(5, CLASSES, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.fc1(x)
        return self.fc2(self.dropout(jnp.tanh(x if self.bn is None else self.bn(x))))


def first(world_size: int) -> Replicas:
    """Return the first `world_size` devices as replicas."""
    return Replicas(jax.devices()[:world_size])


def examples(*shape: int) -> Arrays:
    """Return token sequences whose labels are partly ignored, another part in each sequence."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, (*shape, TOKENS))
    y[..., 1:][rng.random(y[..., 1:].shape) < 0.6] = IGNORE_INDEX  # the first always counts, so that the mean exists
    return {"x": rng.normal(size=(*shape, TOKENS, FEATURES)), "y": y}


def dealt(world_size: int, steps: int, micro: Sequence[int]) -> MicroBatches:
    """Return batches (W, K, ...) in micro-batches of the sizes `micro`, equal except for the last."""
    whole = examples(world_size, steps, sum(micro))
    head = sum(micro[:-1])
    parts = {name: x[:, :, :head].reshape(world_size, steps, -1, micro[0], *x.shape[3:]) for name, x in whole.items()}
    return MicroBatches(parts if head else None, {name: x[:, :, head:] for name, x in whole.items()})


def two_epochs(
    model: nnx.Module, loss_fn: Any, optimizer: Any, arrays: Arrays, **options: Any
) -> tuple[DistributedDataParallel, TrainState, list[float], list[int]]:
    """Train on two replicas; return also the losses, and how often the loss was traced until each epoch's end."""
    traces, losses, traced = [], [], []

    def noted_loss(model: nnx.Module, batch: Batch) -> Any:
        traces.append(batch["x"].shape)
        return loss_fn(model, batch)

    ddp = DistributedDataParallel(model, optimizer, noted_loss, replicas=first(2))
    loader = Loader(arrays, ddp.replicas, **options)
    state = ddp.init()
    for epoch in range(2):
        for batches in loader.epoch(epoch):
            state, sums = ddp.steps(state, batches)
            assert len(sums.table) <= options["steps_per_dispatch"]
            losses += sums["loss"].tolist()
        traced.append(len(traces))
    return ddp, state, losses, traced


def distance(a: Arrays, b: Arrays) -> float:
    """Return the largest difference of any array, relative to the array's largest value."""
    assert a.keys() == b.keys()
    return max(float(np.max(np.abs(a[name] - b[name])) / (1e-300 + np.max(np.abs(b[name])))) for name in b)
