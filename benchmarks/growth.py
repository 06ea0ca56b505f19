"""Measure how cost grows with parameters, leaves, replicas and rows."""

import statistics
import time
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import jax
import numpy as np

from benchmarks import race, speed
from benchmarks.apart import process
from benchmarks.contenders import JAXDDP, Field
from benchmarks.workloads import Workload
from jaxddp import Loader, Replicas, TrainConfig
from jaxddp.data.sampler import epoch_indices

PEERS = (JAXDDP, "pmap")
WIDTHS = {1: 128, 10: 470, 100: 1576}  # of the default MLP's two hidden layers, by the factor on its parameters


def measure(at: int, platform: str, rounds: int, turn: float, small: bool) -> dict[str, Any]:
    """Measure all kinds of growth.

    Args:
        at: number of replicas of all parts but the growth with replicas.
        platform: cpu | gpu.
        rounds: turns of each contender.
        turn: seconds of a turn.
        small: few and small sizes.
    """
    numbers = (1, 2) if small else (1, 2, 4, 8, 16, 32, 64)
    of_replicas = [replicas(number, rounds, turn) for number in numbers]
    with process(at, platform) as call:
        return {
            "parameters": call(parameters, rounds, turn, (1,) if small else (1, 10, 100)),
            "leaves": call(leaves, rounds, turn, (10,) if small else (10, 100, 1000)),
            "replicas": of_replicas,
            "rows": call(rows, (10_000, 100_000) if small else (10_000, 100_000, 1_000_000, 10_000_000)),
        }


def parameters(devices: Sequence[jax.Device], rounds: int, turn: float, factors: Sequence[int]) -> list[dict[str, Any]]:
    """Race jaxddp and pmap by hand on the default MLP with 1, 10 and 100 times its parameters."""
    jobs = [TrainConfig(hidden_sizes=(WIDTHS[factor],) * 2) for factor in factors]
    return [
        {"factor": factor, **_race(devices, Workload("mlp", "", 32, config=config), rounds, turn)}
        for factor, config in zip(factors, jobs, strict=True)
    ]


def leaves(devices: Sequence[jax.Device], rounds: int, turn: float, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Race jaxddp and pmap by hand on a module of 10 to 1,000 small parameters."""
    sizes = {"size": 1, "inputs": 64}
    jobs = [Workload("leaves", "", 32, "many_leaves", {**sizes, "leaves": number}) for number in numbers]
    return [{"leaves": number, **_race(devices, job, rounds, turn)} for number, job in zip(numbers, jobs, strict=True)]


def replicas(number: int, rounds: int, turn: float) -> dict[str, Any]:
    """Race jaxddp and pmap by hand on the default MLP with CPU devices, 64 examples per step over all replicas."""
    job = Workload("mlp", "", 64, config=TrainConfig(global_batch_size=64))
    with process(number, "cpu") as call:
        return {"replicas": number, **call(_race, job, rounds, turn)}


def rows(devices: Sequence[jax.Device], numbers: Sequence[int]) -> list[dict[str, float]]:
    """Time the shuffle of an epoch, and what of it the training thread waits for at the end of the epoch before."""
    return [_of_rows(devices[:2], number) for number in numbers]


def _of_rows(devices: Sequence[jax.Device], number: int) -> dict[str, float]:
    started = time.perf_counter()
    epoch_indices(number, len(devices), epoch=1)
    shuffle = time.perf_counter() - started
    steps = 16
    data = {"x": np.zeros(number, np.int32)}
    batch_size = number // steps // len(devices) * len(devices)
    loader = Loader(data, Replicas(devices), global_batch_size=batch_size, drop_last_batch=True)
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


def _race(devices: Sequence[jax.Device], workload: Workload, rounds: int, turn: float) -> dict[str, Any]:
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
