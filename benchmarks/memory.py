"""Memory of processes."""

import contextlib
from collections.abc import Iterable
from pathlib import Path


def memory(processes: Iterable[int], kinds: tuple[str, ...] = ("Pss_Anon", "Pss_Shmem")) -> int:
    """Return the bytes of memory of processes: by default anonymous and shared pages, each counted once.

    Args:
        processes: their numbers.
        kinds: fields of /proc/PID/smaps_rollup; ("Pss",) counts the pages of mapped files too.
    """
    return 1024 * sum(_pages(process, kinds) for process in processes)


def _pages(process: int, kinds: tuple[str, ...]) -> int:
    """Return the kibibytes of a process's pages; 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(tuple(f"{kind}:" for kind in kinds)))
    return 0
