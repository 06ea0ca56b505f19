"""A command watched from outside: when it prints, when it ends, and how much memory it takes."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.1  # seconds between two looks at the memory
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Watched:
    """A command that has ended.

    Attributes:
        first: seconds from the command to the first line that the pattern matched.
        total: seconds from the command to its end.
        megabytes: peak memory of all its processes; memory that they share counts once. 0: the system does not say.
    """

    first: float
    total: float
    megabytes: float


def watch(command: Sequence[str], pattern: str, env: Mapping[str, str]) -> Watched:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed, or printed no line that the pattern matches.
    """
    lines: list[str] = []
    first, peak, ended = None, [0.0], threading.Event()
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        sampler = threading.Thread(target=_sample, args=(process.pid, peak, ended), daemon=True)
        sampler.start()
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            lines.append(line)
            if first is None and re.match(pattern, line):
                first = time.perf_counter() - started
    total = time.perf_counter() - started
    ended.set()
    sampler.join()
    if process.returncode or first is None:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{''.join(lines[-20:])}")
    return Watched(first, total, peak[0])


def _sample(pid: int, peak: list[float], ended: threading.Event) -> None:
    while not ended.wait(INTERVAL):
        peak[0] = max(peak[0], sum(map(_megabytes, _tree(pid))))


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all that it started."""
    yield pid
    try:
        children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # the process has ended
        return
    for child in (int(word) for words in children for word in words):
        yield from _tree(child)


def _megabytes(pid: int) -> float:
    """Return a process's proportional set size: its own memory, and its part of what it shares."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return 0.0
    return int(match[1]) / 1024 if match else 0.0
