"""Race jaxddp against other implementations of a workload, and measure its input pipeline, messages and retraces."""

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks import race
from benchmarks.compilations import Compilations
from benchmarks.contenders import JAXDDP, OF_TORCH, Field, names
from benchmarks.in_jax import Jaxddp
from benchmarks.race import Length, Result, Spread
from benchmarks.torch_ranks import torch_ranks
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Heat:
    """One race, before it runs.

    Attributes:
        workload: what the contenders train.
        replicas: number of replicas.
        rounds: turns of each contender; 0: no race, only jaxddp.
        seconds: time of a turn.
        all_peers: also race the peers other than pmap by hand and torch DDP, if they take part.
        inside: also measure what a race does not show; see `_inside`.
    """

    workload: Workload
    replicas: int
    rounds: int
    seconds: float
    all_peers: bool = True
    inside: bool = False

    @property
    def names(self) -> list[str]:
        """Contenders."""
        return names(self.workload, self.replicas, self.all_peers) if self.rounds else [JAXDDP]

    @property
    def title(self) -> str:
        """Workload and number of replicas."""
        return f"{self.workload.name}, {self.replicas} replica{'s' if self.replicas > 1 else ''}"


def measure(devices: Sequence[jax.Device], heat: Heat) -> dict[str, Any]:
    """Run a race with one replica per device, and free all that it used."""
    with contextlib.ExitStack() as stack:
        needs_torch = any(name in OF_TORCH for name in heat.names)
        ranks = stack.enter_context(torch_ranks(heat.replicas, devices[0].platform)) if needs_torch else None
        field = Field(heat.workload, devices, ranks)
        length = Length(max(1, heat.rounds), heat.seconds, field.jaxddp.loader.steps_per_epoch)
        results = race.run(field.builders(heat.names), length, time.perf_counter)
        record = {
            "workload": heat.workload.name,
            "replicas": heat.replicas,
            "examples_per_step": heat.workload.batch_size,
            "steps_per_batch": field.steps_per_batch,
            "contenders": {name: _summary(result) for name, result in results.items()},
            "ratios": ratios(results),
        }
        if heat.inside:
            record |= _inside(heat, field.jaxddp, results[JAXDDP])
    del field, results
    free()
    return record


def ratios(results: dict[str, Result]) -> dict[str, dict[str, float]]:
    """Return the time of each other contender's step over that of jaxddp's, round by round."""
    ours = results[JAXDDP].seconds_per_step
    others = {name: result.seconds_per_step for name, result in results.items() if name != JAXDDP}
    return {name: vars(race.ratio(theirs, ours)) for name, theirs in others.items() if theirs}


def free() -> None:
    """Free a race's programs and arrays: compiled programs hold memory maps, whose number Linux limits."""
    jax.clear_caches()
    gc.collect()


def _summary(result: Result) -> dict[str, Any]:
    record: dict[str, Any] = {"setup_seconds": round(result.setup, 1)}
    if result.failure is not None:
        return record | {"failure": result.failure}
    seconds = result.seconds_per_step
    return record | {
        "steps_per_turn": result.steps,
        "seconds_per_step": vars(Spread.of(seconds)),
        "rounds": [float(f"{value:.4g}") for value in seconds],
        "loss": float(f"{result.loss:.5g}"),
    }


def _inside(heat: Heat, contender: Jaxddp, result: Result) -> dict[str, Any]:
    """Measure the input pipeline, the compiled programs' messages and, for the trainer's models, retraces."""
    step = Spread.of(result.seconds_per_step).median
    input_step = contender.input_seconds_per_step(heat.seconds)
    sent, gradient_bytes, buffer_bytes = contender.messages()
    record: dict[str, Any] = {
        "input": {"seconds_per_step": float(f"{input_step:.4g}"), "times_step_rate": float(f"{step / input_step:.3g}")},
        "program": {
            "all_reduces_per_step": sent.count,
            "bytes_per_step": sent.bytes,
            "gradient_bytes": gradient_bytes,
            "buffer_bytes": buffer_bytes,
        },
    }
    if heat.workload.config is not None:  # the trainer evaluates, and its last batch is smaller
        record["program"]["evaluation_bytes"] = contender.evaluation_bytes()
        record["traces"] = _traces(contender)
    return record


def _traces(contender: Jaxddp) -> dict[str, int]:
    """Count the programs traced in the first epoch after the caches were emptied, and in the second."""
    jax.clear_caches()
    state, counts = contender.state(), []
    for epoch in range(2):
        compilations = Compilations()
        for batches in contender.loader.epoch(epoch):
            state, _ = contender.ddp.steps(state, batches)
        jax.block_until_ready(state)
        counts.append(compilations.count)
    return {"first_epoch": counts[0], "second_epoch": counts[1]}
