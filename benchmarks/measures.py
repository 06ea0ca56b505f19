"""Time the default job from outside, in fresh processes, and what verification, log and checkpoints cost in it."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.in_jax import Jaxddp
from benchmarks.processes import WatchedCommand, watch
from jaxddp import TrainConfig
from jaxddp.checkpoint import Checkpoints
from jaxddp.tracking.run_log import RunLog
from jaxddp.train.build import build
from jaxddp.train.parts import Run

FIRST_EPOCH = r"epoch +1/"  # the first line that tells of a step; all programs are compiled by then


def jobs(repeats: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Time the default job of both trainers from the command on: cold, with the compile cache, and torch_ref.

    Args:
        repeats: times that each job runs, in turns; each cold run has a new, empty cache folder.
        flags: further flags of both trainers.
    """
    seen: dict[str, list[WatchedCommand]] = {"jaxddp.train, cold": [], "jaxddp.train, warm": [], "torch_ref.train": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
            for name, watched in seen.items():
                command = [sys.executable, "-m", name.partition(",")[0], *flags]
                watched.append(watch(command, FIRST_EPOCH, _environment(cache)))
    return {name: _medians(watched) for name, watched in seen.items()}


def _environment(cache: str) -> dict[str, str]:
    """Return the environment with another cache folder, and without the variables that set jax's."""
    return {name: value for name, value in os.environ.items() if "_CACHE_" not in name} | {"XDG_CACHE_HOME": cache}


def _medians(watched: Sequence[WatchedCommand]) -> dict[str, float]:
    return {
        "seconds_to_first_epoch": round(statistics.median(run.first for run in watched), 3),
        "seconds_to_end": round(statistics.median(run.total for run in watched), 3),
        "peak_megabytes": round(statistics.median(run.megabytes for run in watched)),
    }


def costs(devices: Sequence[jax.Device], config: TrainConfig) -> dict[str, float]:
    """Measure what surrounds the steps of a job, as shares of the time of an epoch's steps.

    Verification and checkpoints count as often as the job's flags have them.
    """
    run = build(config)
    contender = Jaxddp(run.ddp, run.loader, run.start, run.data.train)
    per_epoch = run.loader.steps_per_epoch
    contender.train(per_epoch)
    epoch = min(contender.train(per_epoch).seconds for _ in range(5))
    state, test_set = contender.state(), run.ddp.place(run.data.tests[""])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        seconds = {
            "verification": _timed(lambda: run.ddp.verify(state)),
            "evaluation": _timed(lambda: jax.block_until_ready(run.ddp.evaluate_placed(state, test_set))),
            "log": _log_seconds(config, Path(folder), per_epoch),
            "checkpoint": _checkpoint_seconds(run, Path(folder)),
        }
    per = {
        "verification": per_epoch / config.verify_every if config.verify_every else 0.0,
        "evaluation": 1.0,
        "log": 1.0,
        "checkpoint": 1 / config.checkpoint_period.count if config.checkpoint_every else 0.0,  # of epochs
    }
    shares = {f"{name}_share": float(f"{seconds[name] * per[name] / epoch:.3g}") for name in seconds}
    return {"epoch_seconds": epoch, **{f"{name}_seconds": value for name, value in seconds.items()}, **shares}


def _timed(call: Callable[[], object], repeats: int = 9) -> float:
    """Return the median time of a call after a first one."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _log_seconds(config: TrainConfig, folder: Path, steps: int) -> float:
    """Time the log of an epoch's steps in a run folder: metrics.jsonl and TensorBoard."""
    with RunLog(config, folder, title="", examples_per_epoch=1, quiet=True) as log:
        started = time.perf_counter()
        for step in range(steps):
            log.step(step + 1, 1, {"loss": 1.0, "accuracy": 0.5}, examples=1)
        return time.perf_counter() - started


def _checkpoint_seconds(run: Run, folder: Path) -> float:
    """Time for which training waits at a checkpoint, after a first one of another step."""
    checkpoints = Checkpoints(folder / "checkpoints")
    contender = Jaxddp(run.ddp, run.loader, run.start, run.data.train)
    state, batches = contender.state(), contender.batches()
    checkpoints.save(run.ddp.unsharded(state))
    state, _ = run.ddp.steps(state, next(batches))
    jax.block_until_ready(state)
    checkpoints.wait()
    started = time.perf_counter()
    checkpoints.save(run.ddp.unsharded(state))
    seconds = time.perf_counter() - started
    checkpoints.close()
    return seconds
