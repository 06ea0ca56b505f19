"""Contenders of the benchmark: each trains the same job from the start and returns its time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.hand_written import HandWritten
from benchmarks.torch_ranks import Timing, TorchRanks
from jaxddp import optim, train
from jaxddp.config import TrainConfig
from jaxddp.step.metrics import EpochSums, InFlight

JAXDDP_ONE = "jaxddp, 1 step per dispatch"
JAXDDP = "jaxddp, as it comes"
PMAP_ONE = "pmap by hand, 1 step per dispatch"
PMAP = "pmap + scan by hand"
TORCH = "torch DDP"
JIT_ONE = "jax.jit, one device, 1 step per call"
JIT = "jax.jit + scan, one device"
LABELS = (JAXDDP_ONE, JAXDDP, PMAP_ONE, PMAP, TORCH, JIT_ONE, JIT)

# Compared pairs: each jaxddp with the contenders that take as many steps per dispatch.
COMPARISONS = {JAXDDP_ONE: (PMAP_ONE, TORCH, JIT_ONE), JAXDDP: (PMAP, TORCH, JIT)}


@dataclass(frozen=True)
class Contender:
    """A contender with a number of replicas.

    Attributes:
        label: one of `LABELS`.
        world_size: number of replicas.
        train: (epochs) -> seconds, and the mean loss of the last epoch.
    """

    label: str
    world_size: int
    train: Callable[[range], Timing]


@dataclass(frozen=True)
class Race:
    """Contenders of a benchmark, and jaxddp's default runs by world size, whose compiled programs are reported."""

    contenders: list[Contender]
    runs: dict[int, train.Run]


def enter(config: TrainConfig, world_sizes: Sequence[int], devices: Sequence[jax.Device], torch: TorchRanks) -> Race:
    """Build every contender for `config`; the global batch size is the same for all world sizes."""
    contenders: list[Contender] = []
    runs: dict[int, train.Run] = {}
    for world_size in world_sizes:
        run = runs[world_size] = _build(config, world_size, devices[0].platform, None)
        contenders += _of_world_size(config, run, _build(config, world_size, devices[0].platform, 1), torch)
    run = runs[world_sizes[0]]
    for label, steps in ((JIT_ONE, 1), (JIT, run.loader.steps_per_dispatch)):
        by_hand = _hand_written(config, devices[:1], steps, plain=True)
        contenders.append(Contender(label, 1, _train_by_hand(by_hand, run)))
    return Race(contenders, runs)


def _build(config: TrainConfig, world_size: int, platform: str, steps_per_dispatch: int | None) -> train.Run:
    fields = {"devices": world_size, "platform": platform, "steps_per_dispatch": steps_per_dispatch}
    return train.build(TrainConfig(**vars(config) | fields))


def _of_world_size(config: TrainConfig, run: train.Run, run_one: train.Run, torch: TorchRanks) -> Iterator[Contender]:
    world_size, devices = run.ddp.world_size, run.ddp.replicas.devices
    one = _hand_written(config, devices, 1)
    several = _hand_written(config, devices, run.loader.steps_per_dispatch)
    yield Contender(JAXDDP_ONE, world_size, _train_jaxddp(run_one))
    yield Contender(JAXDDP, world_size, _train_jaxddp(run))
    yield Contender(PMAP_ONE, world_size, _train_by_hand(one, run))
    yield Contender(PMAP, world_size, _train_by_hand(several, run))
    yield Contender(TORCH, world_size, lambda epochs: torch.train(world_size, config, epochs))


def _train_jaxddp(run: train.Run) -> Callable[[range], Timing]:
    """Return the training loop of jaxddp.train without log, evaluation and checkpoints."""
    ddp, loader, start = run.ddp, run.loader, jax.device_get(run.start)

    def timed(epochs: range) -> Timing:
        state = jax.block_until_ready(ddp.replicas.replicate(start))
        started = time.perf_counter()
        for epoch in epochs:
            in_flight, totals = InFlight(first_step=epoch * loader.steps_per_epoch + 1), EpochSums()
            for batches in loader.epoch(epoch):
                state, sums = ddp.steps(state, batches)
                in_flight.add(sums)
                for _, step_sums in in_flight.finished():
                    totals.add(step_sums)
            for _, step_sums in in_flight.finished(wait=True):
                totals.add(step_sums)
        return time.perf_counter() - started, totals.means()["loss"]

    return timed


def _hand_written(
    config: TrainConfig, devices: Sequence[jax.Device], steps_per_dispatch: int, plain: bool = False
) -> HandWritten:
    return HandWritten(
        optim.from_config(config, total_steps=1),  # unused: the learning rate is constant
        devices,
        plain=plain,
        steps_per_dispatch=steps_per_dispatch,
        batch_size=config.global_batch_size,
        seed=config.seed,
    )


def _train_by_hand(by_hand: HandWritten, run: train.Run) -> Callable[[range], Timing]:
    start = by_hand_state(run)
    data, steps_per_epoch = run.dataset.train, run.loader.steps_per_epoch

    def timed(epochs: range) -> Timing:
        state = jax.block_until_ready(by_hand.place(start))
        started = time.perf_counter()
        _, losses = by_hand.train(state, data, epochs)
        return time.perf_counter() - started, float(np.mean(losses[-steps_per_epoch:]))

    return timed


def by_hand_state(run: train.Run) -> Any:
    """Convert the initial state of a jaxddp run of the mlp to that of the hand-written step."""
    params = run.ddp.functional.params
    layers = [(params[f"layers.{i}.kernel"], params[f"layers.{i}.bias"]) for i in range(len(params) // 2)]
    return jax.device_get((layers, run.ddp.optimizer.init(layers)))
