"""Count what the processes of a job hold: memory, open files, threads, and files on disk."""

import contextlib
import os
from pathlib import Path

from benchmarks.processes import memory
from jaxddp.parity.family import family


def sample(root: int, folder: Path, seconds: float) -> dict[str, float]:
    """Return what a job holds now.

    Memory is anonymous and shared pages, each counted once; files of checkpoints include temporary ones; all other
    files in the run folder are logs.

    Args:
        root: its first process.
        folder: its run folder.
        seconds: time since the soak's start.
    """
    processes = family(root)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for place, _, names in os.walk(folder):  # which passes over a folder that has just been renamed
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(OSError):  # it has just been removed
                parts = path.relative_to(folder).parts
                sizes[parts[0] == "checkpoints" or parts[0].isdigit()].append(path.stat().st_size)
    return {
        "seconds": round(seconds, 1),
        "mebibytes": round(memory(processes) / 2**20, 1),
        "files": sum(_entries(process, "fd") for process in processes),
        "threads": sum(_entries(process, "task") for process in processes),
        "checkpoint_files": len(sizes[True]),
        "checkpoint_bytes": sum(sizes[True]),
        "log_bytes": sum(sizes[False]),
    }


def _entries(process: int, kind: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{process}/{kind}").iterdir())
    return 0
