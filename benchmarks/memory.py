"""Memory of a process and of all that it has started."""

import contextlib
from collections.abc import Iterable
from pathlib import Path


def family(root: int) -> set[int]:
    """Return a process and all below it."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


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
