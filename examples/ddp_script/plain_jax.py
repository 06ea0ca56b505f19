"""The script plain_torch.py in jaxddp: python -m examples.ddp_script.plain_jax"""

import os
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxddp import DistributedDataParallel, Loader, Replicas, cross_entropy, layers, optim, prepare, schedules
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.cluster import find
from jaxddp.distributed.processes import joined
from jaxddp.nn.torch_weights import save_weights, to_torch

EPOCHS, BATCH, ACCUMULATE, LR, MAX_NORM = 5, 16, 2, 1e-2, 0.5


def rings(count: int, seed: int) -> dict[str, np.ndarray]:
    """Draw points of a plane; the label of a point is the ring around 0 that contains it."""
    x = np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)
    return {"x": x, "y": np.digitize(np.hypot(*x.T), [0.8, 1.5])}


class Net(nnx.Module):
    def __init__(self, generator: Generator) -> None:
        self.inner = layers.Linear(2, 32, generator=generator)
        self.outer = layers.Linear(32, 3, generator=generator)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jax.nn.relu(self.inner(x)))


def main(replicas: Replicas) -> None:
    train, test = rings(1024, seed=1), rings(301, seed=2)
    global_batch_size = BATCH * ACCUMULATE * replicas.world_size
    loader = Loader(train, replicas, global_batch_size=global_batch_size, accumulation_steps=ACCUMULATE)
    model = Net(Generator(0))
    optimizer = optim.adamw(schedules.cosine(LR, EPOCHS * loader.steps_per_epoch))
    ddp = DistributedDataParallel(model, optimizer, cross_entropy, replicas=replicas, clip_grad_norm=MAX_NORM)
    state = ddp.init()
    for epoch in range(EPOCHS):
        losses = []
        for batches in loader.epoch(epoch):
            state, sums = ddp.steps(state, batches)
            losses.append(sums["loss"].sum())
        train_loss = float(sum(losses)) / len(train["x"])
        test_loss, accuracy = ddp.evaluate(state, test).values()
        if 0 in replicas.local_ranks:
            print(f"epoch {epoch + 1}  train loss {train_loss:.5f}  test loss {test_loss:.5f}  accuracy {accuracy:.3f}")
    ddp.verify(state)
    weights = to_torch(ddp.values(state)[0])
    if 0 in replicas.local_ranks:
        Path("runs").mkdir(exist_ok=True)
        save_weights("runs/plain_jax.safetensors", weights)


if __name__ == "__main__":
    cluster = find(os.environ)
    with joined(cluster, config={}, timeout=300):
        main(Replicas(prepare(cluster=cluster)))
