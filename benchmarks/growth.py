"""Measure how cost grows with parameters, leaves and replicas."""

import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import race, speed
from benchmarks.apart import process
from benchmarks.contenders import JAXDDP, Field
from benchmarks.workloads import Workload
from jaxddp import TrainConfig
from jaxddp.config.options import Platform

PEERS = (JAXDDP, "pmap")
WIDTHS = {1: 128, 10: 470, 100: 1576}  # of the default MLP's two hidden layers, by the factor on its parameters


def measure(at: int, platform: Platform, rounds: int, turn: float, small: bool) -> dict[str, Any]:
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
