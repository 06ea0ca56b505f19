"""Commands watched from outside: when they print, when they end, and how much memory they take."""

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.parity.family import family

INTERVAL = 0.1  # seconds between two looks at the memory
UNMAPPED = ("Pss_Anon", "Pss_Shmem")  # anonymous and shared pages; "Pss" counts the pages of mapped files too


@dataclass(frozen=True)
class WatchedCommand:
    """A command that has ended.

    Attributes:
        first: seconds from the command to the first line that the pattern matched.
        total: seconds from the command to its end.
        megabytes: peak memory of all its processes; memory that they share counts once. 0: the system does not say.
    """

    first: float
    total: float
    megabytes: float


def watch(command: Sequence[str], pattern: str, env: Mapping[str, str]) -> WatchedCommand:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed, or printed no line that the pattern matches.
    """
    lines: list[str] = []
    first, started = None, time.perf_counter()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process,
        peak_memory(process.pid, ("Pss",)) as peak,
    ):
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            lines.append(line)
            if first is None and re.match(pattern, line):
                first = time.perf_counter() - started
    total = time.perf_counter() - started
    if process.returncode or first is None:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{''.join(lines[-20:])}")
    return WatchedCommand(first, total, peak[0] / 2**20)


@contextlib.contextmanager
def peak_memory(root: int, kinds: tuple[str, ...] = UNMAPPED, interval: float = INTERVAL) -> Iterator[list[int]]:
    """Watch the memory of a process and of all below it; yield a list with the most bytes so far.

    A look at a large process takes 0.05 s, so that it needs a longer interval.
    """
    peak, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(interval):
            peak[0] = max(peak[0], memory(family(root), kinds))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def memory(processes: Iterable[int], kinds: tuple[str, ...] = UNMAPPED) -> int:
    """Return the bytes of memory of processes; memory that they share counts once.

    Args:
        processes: their numbers.
        kinds: fields of /proc/PID/smaps_rollup.
    """
    return 1024 * sum(_kibibytes(process, kinds) for process in processes)


def _kibibytes(process: int, kinds: tuple[str, ...]) -> int:
    """Return the size of a process's pages; 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(tuple(f"{kind}:" for kind in kinds)))
    return 0
