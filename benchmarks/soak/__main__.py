"""`python -m benchmarks.soak`: training jobs that are killed every few minutes for hours, and what that costs them.

The jobs run side by side, jaxddp and torchrun with DDP; each trains the same network on four CPU replicas. The same
signals hit them at the same moments, drawn from a seed. A job that has ended is started again, as a cluster's scheduler
would. Reported are the steps that each kill cost, the time until the job had come further than before, and whether
memory, open files, threads and checkpoints stay level.
"""

import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.provenance import provenance
from benchmarks.soak.jobs import JaxddpJob, SoakJob, TorchDDPJob
from benchmarks.soak.report import to_markdown
from benchmarks.soak.watched import WatchedJob
from jaxddp import cli
from jaxddp.errors import InputError, check_name

JOBS: dict[str, type[SoakJob]] = {"jaxddp": JaxddpJob, "torch": TorchDDPJob}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)  # two of three kills leave no time
LOOK_EVERY = 2.0  # seconds


@dataclass(frozen=True)
class SoakOptions:
    """Kill training jobs for hours, and report what they lose and hold."""

    minutes: float = 120.0
    """Length of the soak."""
    kill_every: float = 180.0
    """Mean seconds between two kills, drawn between a third and five thirds of it."""
    checkpoint_every: float = 30.0
    """Seconds between two checkpoints."""
    jobs: tuple[str, ...] = ("jaxddp", "torch")
    """Jobs: jaxddp, torch."""
    seed: int = 0
    """Seed of the kills."""
    output: str = "soak"
    """New folder for the run folders, what the jobs print, and soak.json."""


def kills(options: SoakOptions) -> Iterator[tuple[float, signal.Signals]]:
    """Yield the moments of the kills, in seconds, and their signals.

    >>> of_an_hour = [*kills(SoakOptions(minutes=60))]
    >>> len(of_an_hour), min(b[0] - a[0] for a, b in zip(of_an_hour, of_an_hour[1:])) >= 60
    (19, True)
    """
    rng, moment = random.Random(options.seed), 0.0
    while True:
        moment += options.kill_every * rng.uniform(1 / 3, 5 / 3)
        if moment >= 60 * options.minutes:
            return
        yield moment, rng.choice(SIGNALS)


def soak(options: SoakOptions, folder: Path) -> list[WatchedJob]:
    """Run the jobs and kill them; return what was seen of each."""
    watched = [WatchedJob(JOBS[name](folder / name, options.checkpoint_every), options.seed) for name in options.jobs]
    started, planned = time.monotonic(), [*kills(options)]
    try:
        while (seconds := time.monotonic() - started) < 60 * options.minutes:
            due = [planned.pop(0)] if planned and planned[0][0] <= seconds else []
            for one in watched:
                one.keep_running()
                one.look(seconds)
                for _, number in due:
                    one.kill(number, seconds)
            time.sleep(LOOK_EVERY)
    finally:
        for one in watched:
            one.end()
    return watched


def main(options: SoakOptions) -> None:
    """Run the soak; print and save its report."""
    for name in options.jobs:
        check_name("--jobs", name, JOBS)
    folder = Path(options.output)
    if folder.exists():
        raise InputError(f"--output {folder}: exists; must be a new folder")
    folder.mkdir(parents=True)
    watched = soak(options, folder)
    of_jobs = {one.job.name: one.record() for one in watched}
    record = {
        "options": dataclasses.asdict(options),
        "provenance": provenance("python -m benchmarks.soak", jax.devices("cpu")[0]),
        "jobs": of_jobs,
    }
    (folder / "soak.json").write_text(json.dumps(record, indent=1))
    print(to_markdown(of_jobs))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        main(cli.parse_plain(SoakOptions, sys.argv[1:], "python -m benchmarks.soak"))
