"""Measure how cost grows with parameters, leaves, replicas and rows.

`python -m benchmarks.growth 1 2 4 --seconds 0.5` measures numbers of replicas in this process, and prints JSON.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks import race, speed
from benchmarks.contenders import JAXDDP, Field
from benchmarks.workloads import Workload
from jaxddp import Loader, Replicas, TrainConfig
from jaxddp.data.sampler import epoch_indices
from jaxddp.distributed.devices import prepare

Advance = Callable[[str], None]
PEERS = (JAXDDP, "pmap")
WIDTHS = {1: 128, 10: 470, 100: 1576}  # of the default MLP's two hidden layers, by the factor on its parameters
PARTS = 4
SECONDS = 160.0  # of all parts on two cores, for the estimate


def measure(devices: Sequence[jax.Device], rounds: int, turn: float, small: bool, advance: Advance) -> dict[str, Any]:
    """Measure all kinds of growth; `advance` is called after each of the `PARTS`."""
    record: dict[str, Any] = {}
    for name, part in (
        ("parameters", lambda: parameters(devices, rounds, turn, (1,) if small else (1, 10, 100))),
        ("leaves", lambda: leaves(devices, rounds, turn, (10,) if small else (10, 100, 1000))),
        ("replicas", lambda: in_child((1, 2) if small else (1, 2, 4, 8, 16, 32, 64), rounds, turn)),
        ("rows", lambda: rows((10_000, 100_000) if small else (10_000, 100_000, 1_000_000, 10_000_000))),
    ):
        record[name] = part()
        advance(f"growth of {name}")
    return record


def parameters(devices: Sequence[jax.Device], rounds: int, turn: float, factors: Sequence[int]) -> list[dict[str, Any]]:
    """Race jaxddp and pmap by hand on the default MLP with 1, 10 and 100 times its parameters."""
    jobs = [TrainConfig(hidden_sizes=(WIDTHS[factor],) * 2) for factor in factors]
    return [
        {"factor": factor, **_race(Workload("mlp", "", 32, config=config), devices, rounds, turn)}
        for factor, config in zip(factors, jobs, strict=True)
    ]


def leaves(devices: Sequence[jax.Device], rounds: int, turn: float, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Race jaxddp and pmap by hand on a module of 10 to 1,000 small parameters."""
    sizes = {"size": 1, "inputs": 64}
    jobs = [Workload("leaves", "", 32, "many_leaves", {**sizes, "leaves": number}) for number in numbers]
    return [{"leaves": number, **_race(job, devices, rounds, turn)} for number, job in zip(numbers, jobs, strict=True)]


def replicas(devices: Sequence[jax.Device], numbers: Sequence[int], rounds: int, turn: float) -> list[dict[str, Any]]:
    """Race jaxddp and pmap by hand on the default MLP, 64 examples per step over all replicas."""
    job = Workload("mlp", "", 64, config=TrainConfig(global_batch_size=64))
    return [{"replicas": number, **_race(job, devices[:number], rounds, turn)} for number in numbers]


def in_child(numbers: Sequence[int], rounds: int, turn: float) -> list[dict[str, Any]]:
    """Run `replicas` in a process of its own, since the number of CPU devices is fixed when jax starts."""
    words = [*map(str, numbers), "--rounds", str(rounds), "--seconds", str(turn)]
    command = [sys.executable, "-m", "benchmarks.growth", *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def rows(numbers: Sequence[int]) -> list[dict[str, float]]:
    """Time the shuffle of an epoch, and what of it the training thread waits for at the end of the epoch before."""
    return [_of_rows(number) for number in numbers]


def _of_rows(number: int) -> dict[str, float]:
    started = time.perf_counter()
    epoch_indices(number, 2, epoch=1)
    shuffle = time.perf_counter() - started
    steps = 16
    data = {"x": np.zeros(number, np.int32)}
    batch_size = number // steps // 2 * 2
    loader = Loader(data, Replicas(jax.devices()[:2]), global_batch_size=batch_size, drop_last_batch=True)
    loader.steps_per_dispatch = 1
    batches = chain.from_iterable(map(loader.epoch, count()))
    waits = []
    for _ in range(2 * steps + 1):
        started = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - started)
        time.sleep(2 * shuffle / steps)  # steps that take twice as long as the shuffle
    # The loader is one batch ahead, so the shuffle may be met at the last batch or at the next epoch's first.
    at_the_end = max(waits[steps - 1 : steps + 2])
    usual = statistics.median(waits[2 : steps - 1])
    return {
        "rows": number,
        "shuffle_seconds": float(f"{shuffle:.3g}"),
        "wait_between_epochs_seconds": float(f"{at_the_end:.3g}"),
        "wait_between_batches_seconds": float(f"{usual:.3g}"),
    }


def _race(workload: Workload, devices: Sequence[jax.Device], rounds: int, turn: float) -> dict[str, Any]:
    field = Field(workload, devices, None)
    length = race.Length(rounds, turn, field.jaxddp.loader.steps_per_epoch)
    results = race.run(field.builders(PEERS), length, time.perf_counter)
    start = field.jaxddp.ddp.functional.params
    del field
    speed.free()
    return {
        "parameters": sum(array.size for array in start.values()),
        "seconds_per_step": race.Spread.of(results[JAXDDP].seconds_per_step).median,
        "setup_seconds": round(results[JAXDDP].setup, 1),
        "ratios": speed.ratios(results),
    }


@dataclass(frozen=True)
class Options:
    """Race jaxddp and pmap by hand on several numbers of CPU devices, and print one line of JSON."""

    replicas: tyro.conf.Positional[tuple[int, ...]]
    """Numbers of replicas."""
    rounds: int = 3
    """Turns of each contender."""
    seconds: float = 0.3
    """Seconds of a turn."""


if __name__ == "__main__":
    asked = tyro.cli(Options)
    print(json.dumps(replicas(prepare(max(asked.replicas), "cpu"), asked.replicas, asked.rounds, asked.seconds)))
