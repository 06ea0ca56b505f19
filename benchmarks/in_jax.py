"""jaxddp as a contender: its trainer, and a user's module through `DistributedDataParallel` and `Loader`."""

import time
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any

import jax
import numpy as np

from benchmarks import models_jax
from benchmarks.race import Turn
from benchmarks.workloads import Workload
from jaxddp import DistributedDataParallel, Loader, Replicas, TrainConfig, optim
from jaxddp.config.options import Platform
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.nn.torch_weights import to_torch
from jaxddp.plan.messages import Messages, all_reduces
from jaxddp.state import TrainState
from jaxddp.step.metrics import InFlight, step_metrics
from jaxddp.train.build import build


class Jaxddp:
    """Training loop of jaxddp.train without log, evaluation and checkpoints."""

    def __init__(self, ddp: DistributedDataParallel, loader: Loader, state: TrainState, arrays: Any):
        self.ddp, self.loader, self._arrays = ddp, loader, arrays
        self._start = jax.device_get(state)

    def state(self) -> TrainState:
        """Return the initial state on the devices; `train` leaves it as it is."""
        return jax.block_until_ready(self.ddp.place_state(self._start))

    def batches(self) -> Iterator[MicroBatches]:
        """Yield the batches of all epochs."""
        return chain.from_iterable(map(self.loader.epoch, count()))

    def train(self, steps: int) -> Turn:
        """Train from the initial state; see `benchmarks.race.Contender`."""
        state, batches, in_flight = self.state(), self.batches(), InFlight(first_step=1)
        losses: list[float] = []
        dispatched, batch = 0, next(batches)  # the first shuffle is not timed
        started = time.perf_counter()
        while True:
            state, sums = self.ddp.steps(state, batch)
            in_flight.add(sums)
            dispatched += len(sums.table)
            losses += [step_metrics(of_step)["loss"] for _, of_step in in_flight.finished()]
            if dispatched >= steps:
                break
            batch = next(batches)
        losses += [step_metrics(of_step)["loss"] for _, of_step in in_flight.finished(wait=True)]
        return Turn(time.perf_counter() - started, losses)

    def weights(self) -> dict[str, np.ndarray]:
        """Return the initial weights under torch's names."""
        return to_torch({**self.ddp.functional.params, **self.ddp.functional.buffers})

    def messages(self) -> tuple[Messages, int, int]:
        """Return one step's all-reduces, read from the compiled program, and the bytes of gradients and of buffers."""
        one_step = jax.tree.map(lambda leaf: leaf[:, :1], next(self.loader.epoch(0)))
        sent = all_reduces(self.ddp.compiled_text(self.state(), self.ddp.replicas.shard(one_step)))
        sizes = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (self._start.params, self._start.buffers)
        )
        return sent, *sizes

    def evaluation_bytes(self) -> int:
        """Return the bytes that an evaluation of the training set all-reduces."""
        batches = [*self.ddp.place(self._arrays)]
        texts = (self.ddp._evaluation.dispatch.compiled_text(self.state(), of_part) for of_part in batches)
        return sum(all_reduces(text).bytes for text in texts)

    def input_seconds_per_step(self, seconds: float) -> float:
        """Measure the input pipeline alone, for about `seconds`: shuffle, gather, place."""
        steps, started = 0, time.perf_counter()
        for epoch in count(1):
            for batch in self.loader.epoch(epoch):
                steps += jax.block_until_ready(next(iter(batch.last.values()))).shape[1]
            if time.perf_counter() - started > seconds:
                break
        return (time.perf_counter() - started) / steps


def trainer(workload: Workload, world_size: int, platform: Platform, steps_per_dispatch: int | None = None) -> Jaxddp:
    """Build the parts of `jaxddp.train`."""
    assert workload.config is not None, "the trainer has the model"
    fields = {"devices": world_size, "platform": platform, "steps_per_dispatch": steps_per_dispatch}
    run = build(TrainConfig(**vars(workload.config) | fields))
    return Jaxddp(run.ddp, run.loader, run.start, run.data.train)


def module(workload: Workload, devices: Sequence[jax.Device], steps_per_dispatch: int | None = None) -> Jaxddp:
    """Train the workload's module as a user of the library does."""
    replicas = Replicas(devices)
    arrays = workload.arrays()
    loader = Loader(arrays, replicas, global_batch_size=workload.batch_size, steps_per_dispatch=steps_per_dispatch)
    ddp = DistributedDataParallel(
        models_jax.build(workload), optim.adam(workload.lr), models_jax.loss_fn, replicas=replicas
    )
    return Jaxddp(ddp, loader, ddp.init(), arrays)
