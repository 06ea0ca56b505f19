"""Measure the optimizer steps per second of the default training job (`make bench`).

python -m benchmarks.steps_per_second
python -m benchmarks.steps_per_second --rounds 15 --replicas 2 --output benchmarks/results/mine.json

jaxddp takes turns with torch DDP, hand-written pmap and plain jax.jit, all in one process (torch: in processes that
stay up). Ratios are taken within each round, whose members meet the same load of the machine; the report shows their
medians and extremes. The exit code is 0 whatever the speed.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks import report
from benchmarks.contenders import COMPARISONS, JIT, JIT_ONE, Race, enter
from benchmarks.hlo import all_reduces
from benchmarks.torch_ranks import torch_ranks
from jaxddp import train
from jaxddp.config import TrainConfig
from jaxddp.distributed.devices import prepare
from jaxddp.errors import InputError

Seconds = dict[tuple[str, int], list[float]]  # seconds per step, by label and world size, one per round


@dataclass(frozen=True)
class Options:
    """Measure steps per second of the default training job: jaxddp, torch DDP, hand-written pmap and jax.jit."""

    rounds: int = 9
    """Runs of each contender."""
    steps: int = 225
    """Optimizer steps of each run, rounded up to whole epochs."""
    replicas: tuple[int, ...] = (1, 2, 4)
    """Numbers of replicas; those above the number of GPUs are left out."""
    platform: str | None = None
    """cpu | gpu. None: GPUs if there are any."""
    output: Path | None = None
    """Write the numbers to this JSON file too."""


def main(options: Options) -> dict[str, Any]:
    """Run the benchmark, print it, and return its record."""
    devices, world_sizes = _devices(options)
    provenance = report.provenance(_command(options), devices[0])  # before the run, whose own load does not count
    config = TrainConfig()
    for world_size in world_sizes:
        config.per_replica_batch_size(world_size)
    with torch_ranks(max(world_sizes), devices[0].platform) as torch:
        race = enter(config, world_sizes, devices, torch)
        steps_per_epoch = race.runs[world_sizes[0]].loader.steps_per_epoch
        epochs = range(max(1, -(-options.steps // steps_per_epoch)))
        seconds, losses = run_rounds(race, epochs, options.rounds, steps_per_epoch)
    record = {
        **provenance,
        "job": report.describe_job(config, world_sizes),
        "optimizer_steps": len(epochs) * steps_per_epoch,
        "rounds": options.rounds,
        "steps_per_dispatch": {str(w): run.loader.steps_per_dispatch for w, run in race.runs.items()},
        "contenders": [_summary(label, w, times, losses[label, w]) for (label, w), times in seconds.items()],
        "ratios": ratios(seconds, world_sizes),
        "programs": {str(w): program(run) for w, run in race.runs.items()},
    }
    record["aims"] = report.aims(record["ratios"])
    print(report.text(record))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    return record


def _command(options: Options) -> str:
    flags = f"--rounds {options.rounds} --steps {options.steps} --replicas {' '.join(map(str, options.replicas))}"
    platform = "" if options.platform is None else f" --platform {options.platform}"
    return f"python -m benchmarks.steps_per_second {flags}{platform}"


def _devices(options: Options) -> tuple[list[jax.Device], list[int]]:
    """Return the devices, and the world sizes that fit on them."""
    most = max(options.replicas)
    try:
        devices = prepare(most, options.platform)
    except InputError:
        devices = prepare(None, options.platform)  # too few GPUs: take all of them
    world_sizes = sorted({count for count in options.replicas if count <= len(devices)})
    if not world_sizes:
        raise InputError(f"--replicas {' '.join(map(str, options.replicas))}: there are {len(devices)} devices")
    return devices, world_sizes


def run_rounds(
    race: Race, epochs: range, rounds: int, steps_per_epoch: int
) -> tuple[Seconds, dict[tuple[str, int], float]]:
    """Run all contenders in turn, starting each round with a different one; return seconds and losses."""
    contenders = race.contenders
    seconds: Seconds = {(c.label, c.world_size): [] for c in contenders}
    losses = {}
    for contender in tqdm(contenders, desc="compile and warm up", leave=False, disable=None):
        contender.train(range(1))  # one epoch holds every shape of a batch
    for number in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        first = number * 3 % len(contenders)  # 3 at a time, so that few rounds also reach the last contenders
        for contender in contenders[first:] + contenders[:first]:
            time, losses[contender.label, contender.world_size] = contender.train(epochs)
            seconds[contender.label, contender.world_size].append(time / (len(epochs) * steps_per_epoch))
    return seconds, losses


def ratios(seconds: Seconds, world_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Compute jaxddp's steps per second relative to each other contender's, round by round."""
    results = []
    for ours, others in COMPARISONS.items():
        for other in others:
            for world_size in world_sizes:
                their_size = 1 if other in (JIT, JIT_ONE) else world_size
                pairs = zip(seconds[other, their_size], seconds[ours, world_size], strict=True)
                speedups = [theirs / mine for theirs, mine in pairs]
                results.append({"jaxddp": ours, "other": other, "replicas": world_size, **_spread(speedups)})
    return results


def program(run: train.Run) -> dict[str, int]:
    """Read from the compiled program what each replica sends in a step; also return the size of the gradients."""
    batches = next(run.loader.epoch(0))
    steps = batches.last["y"].shape[1]
    sent = all_reduces(run.ddp.compiled_text(run.start, batches))
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(run.start.params))
    return {
        "all_reduces_per_step": sent.count // steps,
        "all_reduced_bytes_per_step": sent.bytes // steps,
        "gradient_bytes": gradients,
    }


def _summary(label: str, world_size: int, seconds_per_step: Sequence[float], loss: float) -> dict[str, Any]:
    speeds = _spread([1 / seconds for seconds in seconds_per_step])
    each = [float(f"{seconds:.4g}") for seconds in seconds_per_step]
    return {
        "name": label,
        "replicas": world_size,
        "steps_per_second": speeds,
        "seconds_per_step": each,
        "last_epoch_loss": float(f"{loss:.4g}"),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(np.format_float_positional(x, 4, fractional=False)) for name, x in numbers.items()}


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m benchmarks.steps_per_second"))
    except InputError as error:
        sys.exit(f"error: {error}")
