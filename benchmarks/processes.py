"""A command watched from outside: when it prints, when it ends, and how much memory it takes."""

import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.memory import memory
from jaxddp.parity.family import family

INTERVAL = 0.1  # seconds between two looks at the memory


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
        peak[0] = max(peak[0], memory(family(pid), ("Pss",)) / 2**20)
