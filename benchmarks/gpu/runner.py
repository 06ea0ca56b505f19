"""Run the parts one after another, each as a process with a time limit.

A part that crashes or takes too long is recorded with its last lines, and the others go on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.children import LAST_LINES, last_lines

# Minutes that a part should take at most; time that it leaves goes to the parts after it.
PARTS = {
    "machine": 3,
    "parity": 5,
    "precision": 3,
    "tests": 5,
    "benchmark": 11,
    "utilisation": 9,
    "profile": 3,
    "page": 1,
}
PAGE = "page"
PATIENCE = 5.0  # seconds that a part has to end after it was told to

Command = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Ending:
    """Outcome of a part.

    Attributes:
        part: its name.
        complete: whether nothing is left to measure.
        text: "complete", "kept from an earlier run", or why it failed.
        seconds: time that it took.
    """

    part: str
    complete: bool
    text: str
    seconds: float


def run(
    folder: Path, parts: Sequence[str], minutes: float, smoke: bool, command: Command | None = None
) -> list[Ending]:
    """Run the parts that are not complete, in order, and then the page; print a line for each as it ends.

    Args:
        folder: folder of the results.
        parts: names of the parts.
        minutes: time of all parts together.
        smoke: whether sizes are tiny.
        command: makes the command of a part; None: its module.
    """
    command = command or (lambda part: module_command(part, folder, smoke))
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    ordered = [part for part in PARTS if part in parts and part != PAGE] + [PAGE]
    endings = []
    for number, part in enumerate(ordered):
        limit = share(ordered[number:], deadline - time.monotonic())
        endings.append(_run_part(part, folder, smoke, command(part), limit))
        print(line(endings[-1]), flush=True)
    return endings


def module_command(part: str, folder: Path, smoke: bool) -> list[str]:
    """Return the command of a part's module."""
    return [sys.executable, "-m", f"benchmarks.gpu.{part}", str(folder), *(["--smoke"] if smoke else [])]


def share(parts: Sequence[str], seconds: float) -> float:
    """Return the seconds that the first of some parts may take of the seconds that are left for all of them.

    The page always has its own, which needs no GPU.

    >>> share(["profile", "page"], 120), share(["page"], -1)
    (90.0, 60.0)
    """
    allowed = seconds * PARTS[parts[0]] / sum(PARTS[part] for part in parts)
    return 60.0 * PARTS[PAGE] if parts[0] == PAGE else max(0.0, allowed)


def line(ending: Ending) -> str:
    """Return the line that is printed when a part has ended."""
    return f"{ending.part:12}{ending.seconds:6.0f} s  {ending.text}"


def _run_part(part: str, folder: Path, smoke: bool, command: Sequence[str], limit: float) -> Ending:
    if part != PAGE and records.is_complete(records.read(folder, part), smoke):
        return Ending(part, True, "kept from an earlier run", 0.0)
    log = records.log_of(folder, part)
    records.reopen(folder, part, smoke)
    started = time.monotonic()
    code = _watched(command, log, limit)
    seconds = time.monotonic() - started
    record = records.read(folder, part)
    if code == 0 and records.is_complete(record, smoke):
        return Ending(part, True, "complete", seconds)
    why = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
    if code == 1 and records.FAILURE in record:  # it has said so itself
        return Ending(part, False, record[records.FAILURE], seconds)
    said = last_lines(log.read_text(errors="replace"), LAST_LINES)
    ended = {"complete": False, "seconds": round(seconds, 1), records.FAILURE: why, "last_lines": said}
    records.write(folder, part, record | ended)
    return Ending(part, False, f"{why}; {said[-1].strip() if said else 'no output'}", seconds)


def _watched(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Run a command with its output in a file; return its exit code, or None if it had to be stopped."""
    with log.open("w") as output, _ended(_start(command, output)) as process:
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None


def _start(command: Sequence[str], output: Any) -> subprocess.Popen[bytes]:
    # A session of its own, so that its children can be ended with it; without a buffer, so that an error comes last.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End a process with all that it started, whatever happens inside."""
    try:
        yield process
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
