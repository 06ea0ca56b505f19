"""Script in JAX: one process holds all replicas, so it also works in a notebook.

python -m examples.ddp_script.script_jax
"""

import os
import sys

import jax
import numpy as np

from examples.ddp_script.problem import (
    CLASSES,
    FEATURES,
    HIDDEN,
    TEST,
    TRAIN,
    Accuracy,
    Arrays,
    Line,
    Run,
    Settings,
    arrays,
)
from jaxddp import DistributedDataParallel, Loader, Replicas, cli, optim, prepare
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.data.torch_rng import Generator
from jaxddp.models import MLP
from jaxddp.nn.torch_weights import to_torch
from jaxddp.state import TrainState


def run(settings: Settings) -> Run:
    """Train on all replicas, with the torch script's initial weights and sample order."""
    replicas = Replicas(prepare(settings.devices, settings.platform))
    with jax.enable_x64(settings.dtype == "float64"):
        return _run(settings, replicas)


def _run(settings: Settings, replicas: Replicas) -> Run:
    model = MLP(FEATURES, HIDDEN, CLASSES, generator=Generator(settings.seed))
    ddp = DistributedDataParallel(model, optim.sgd(settings.lr), replicas=replicas, dtype=settings.dtype)
    data = arrays(TRAIN, settings.dtype)
    size = replicas.world_size * settings.batch_size
    loaders = {
        drop_last: Loader(data, replicas, global_batch_size=size, steps_per_dispatch=1, drop_last_batch=drop_last)
        for drop_last in (True, False)
    }

    def step(state: TrainState, batches: MicroBatches) -> tuple[TrainState, jax.Array]:
        """Take a step that returns each replica's loss; `DistributedDataParallel.steps` returns their sum."""
        state, _, stages = ddp.replica_step(state, jax.tree.map(lambda x: x[0], batches))
        return state, stages["local_loss"]

    train_step = replicas.map(step, in_axes=(None, 0), out_axes=(None, 0))
    state = ddp.init()
    lines = []
    for epoch in range(settings.epochs):
        for batches in loaders[settings.drop_last].epoch(epoch):  # the number takes the place of torch's set_epoch
            rows = np.asarray(batches.last["row"])[:, 0].tolist()
            state, losses = train_step(state, batches)
            lines += [Line(r, epoch, tuple(rows[r]), loss) for r, loss in enumerate(losses.tolist())]
    ddp.verify(state)  # raises unless all replicas hold the same bits

    rows_by_loader = {drop_last: rows_of(loader, settings.epochs - 1) for drop_last, loader in loaders.items()}
    return Run(
        lines,
        train=accuracy(ddp, state, data),
        test=accuracy(ddp, state, arrays(TEST, settings.dtype)),
        by_loader={
            drop_last: accuracy(ddp, state, {name: array[rows] for name, array in data.items()})
            for drop_last, rows in rows_by_loader.items()
        },
        weights=to_torch(ddp.values(state)[0]),
        processes={os.getpid()},
    )


def accuracy(ddp: DistributedDataParallel, state: TrainState, rows: Arrays) -> Accuracy:
    """Evaluate rows on all replicas; padding is not counted."""
    sums = ddp.evaluate_placed(state, ddp.place({"x": rows["x"], "y": rows["y"]}))
    return Accuracy(int(sums["accuracy"]), int(sums["count"]))


def rows_of(loader: Loader, epoch: int) -> np.ndarray:
    """Return the rows of all replicas in an epoch of a loader."""
    return np.concatenate([batch.last["row"].ravel() for batch in loader.host_batches(epoch)])


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        chosen = cli.parse_plain(Settings, sys.argv[1:], "python -m examples.ddp_script.script_jax")
        run(chosen).show(chosen)
