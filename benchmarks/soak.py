"""`python -m benchmarks.soak`: a training job that is killed every few minutes for hours, and what that costs it.

`jaxddp.train` trains the convnet on four CPU replicas. Signals drawn from a seed end it at moments drawn from the seed;
each time it is started again with --resume, as a cluster's scheduler would. Reported are the steps and checkpoints that
are lost, and whether memory, open files, threads and disk stay level.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.processes import memory
from benchmarks.provenance import provenance
from benchmarks.tables import table
from jaxddp import cli
from jaxddp.errors import InputError

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)  # two of three leave no time
LOOK_EVERY = 2.0  # seconds
LEVELS = ("memory, MiB", "open files", "threads", "files of checkpoints", "checkpoints, kB")


@dataclass(frozen=True)
class SoakOptions:
    """Kill a training job for hours, and report what it loses and holds."""

    minutes: float = 120.0
    """Length of the soak."""
    kill_every: float = 180.0
    """Mean seconds from a start to the kill, drawn between a third and five thirds of it."""
    checkpoint_every: float = 30.0
    """Seconds between two checkpoints."""
    seed: int = 0
    """Seed of the kills."""
    output: str = "soak"
    """New folder for the run folder, what the job prints, and soak.json."""


@dataclass(frozen=True)
class Ended:
    """End of one start of the job.

    Attributes:
        signal: name of the signal that was sent; "none": it ended by itself.
        exit_code: exit code.
        reached: last step in the log or of a checkpoint before the signal.
        saved: step of the newest checkpoint after it.
    """

    signal: str
    exit_code: int
    reached: int
    saved: int


def command(run: Path, checkpoint_every: float) -> list[str]:
    """Return the command that starts the job in a run folder or goes on with it."""
    train = [sys.executable, "-m", "jaxddp.train"]
    if newest(run):
        return [*train, "--resume", str(run)]
    size = ["--model", "convnet", "--devices", "4", "--platform", "cpu", "--epochs", "1000000", "--log-every", "50"]
    every = f"{checkpoint_every / 60:.4f}minutes"
    return [*train, *size, "--checkpoint-every", every, "--keep-checkpoints", "2", "--output", str(run)]


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit()), default=0)


def logged(run: Path) -> list[int]:
    """Return the steps that the log holds, in the order in which they were written."""
    steps: list[int] = []
    log = run / "metrics.jsonl"
    for line in log.read_bytes().splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):  # a line that was cut by a kill
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "step":
                steps.append(record["step"])
    return steps


def sample(process: int, run: Path) -> dict[str, float]:
    """Return what a process and its run folder hold now; files of checkpoints include temporary ones."""
    sizes = []
    for place, _, names in os.walk(run / "checkpoints"):  # which passes over a folder that has just been renamed
        for name in names:
            with contextlib.suppress(OSError):  # it has just been removed
                sizes.append(Path(place, name).stat().st_size)
    files, threads = (len([*Path(f"/proc/{process}/{kind}").iterdir()]) for kind in ("fd", "task"))
    values = (memory([process]) / 2**20, files, threads, len(sizes), sum(sizes) / 1000)
    return dict(zip(LEVELS, values, strict=True))


def soak(options: SoakOptions, run: Path) -> dict[str, Any]:
    """Run the job, end it again and again, and return what was seen."""
    rng = random.Random(options.seed)
    ends: list[Ended] = []
    samples: list[dict[str, float]] = []
    last = time.monotonic() + 60 * options.minutes
    while time.monotonic() < last:
        until = time.monotonic() + options.kill_every * rng.uniform(1 / 3, 5 / 3)  # also of the last start
        with run.with_suffix(".log").open("ab") as said:
            process = subprocess.Popen(command(run, options.checkpoint_every), stdout=said, stderr=said)
        try:
            while time.monotonic() < until and process.poll() is None:
                samples.append(sample(process.pid, run))
                time.sleep(LOOK_EVERY)
            number = rng.choice(SIGNALS)
            name = number.name if process.poll() is None else "none"
            reached = max([newest(run), *logged(run)])
            process.send_signal(number)
            process.wait()
        finally:
            process.kill()
        ends.append(Ended(name, process.wait(), reached, newest(run)))
    steps = logged(run)
    return {
        "ends": [dataclasses.asdict(end) for end in ends],
        "steps": max([newest(run), *steps]),
        "logged_once": steps == sorted(set(steps)),
        "damaged": len([*run.glob("checkpoints/*.damaged")]),
        "samples": samples,
    }


def to_markdown(seen: dict[str, Any]) -> str:
    """Return what was seen as a table."""
    ends = [Ended(**end) for end in seen["ends"]]
    counts = Counter((end.signal, end.exit_code) for end in ends)
    rows = {
        "ends": ", ".join(f"{count} {name} (exit code {code})" for (name, code), count in sorted(counts.items())),
        "steps": f"{seen['steps']:,}",
        "steps lost by SIGKILL: median, most": lost(ends, "SIGKILL"),
        "steps lost by SIGTERM: median, most": lost(ends, "SIGTERM"),
        "starts that came no further": sum(after.reached <= end.reached for end, after in itertools.pairwise(ends)),
        "damaged checkpoints": seen["damaged"],
        "each step is logged once": "yes" if seen["logged_once"] else "no",
    }
    for name in LEVELS:
        levels = ", ".join(f"{value:,.0f}" for value in level([one[name] for one in seen["samples"]]))
        rows[f"{name}: first quarter, last quarter, most"] = levels
    return table(["", "jaxddp"], rows.items())


def lost(ends: Sequence[Ended], of_signal: str) -> str:
    """Return the steps that the kills by a signal cost, to within the log's interval.

    >>> lost([Ended("SIGKILL", -9, 90, 60), Ended("SIGKILL", -9, 200, 150), Ended("SIGTERM", 75, 80, 85)], "SIGKILL")
    '40, 50'
    """
    steps = [max(0, end.reached - end.saved) for end in ends if end.signal == of_signal]
    return f"{statistics.median(steps):,.0f}, {max(steps):,}" if steps else "-"


def level(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the medians of the first and of the last quarter of the values, and the maximum.

    >>> level([3, 3, 9, 4])
    (3, 4, 9)
    """
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:]), max(values)


def main(options: SoakOptions) -> None:
    """Run the soak; print and save its report."""
    folder = Path(options.output)
    if folder.exists():
        raise InputError(f"--output {folder}: exists; must be a new folder")
    folder.mkdir(parents=True)
    of_command = provenance("python -m benchmarks.soak", jax.devices("cpu")[0])
    seen = soak(options, folder / "jaxddp")
    record = {"options": dataclasses.asdict(options), "provenance": of_command, **seen}
    (folder / "soak.json").write_text(json.dumps(record, indent=1))
    print(to_markdown(seen))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        main(cli.parse_plain(SoakOptions, sys.argv[1:], "python -m benchmarks.soak"))
