"""Count what the processes of a job hold: memory, open files, threads, and files on disk."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import memory
from jaxddp.parity.family import family


@dataclass(frozen=True)
class ResourceSample:
    """Resources that a job holds at one time.

    Attributes:
        seconds: time since the soak's start.
        mebibytes: anonymous and shared pages of all processes, each counted once.
        files: open descriptors of all processes.
        threads: threads of all processes.
        checkpoint_files: files of checkpoints on disk, temporary ones included.
        checkpoint_bytes: their sizes.
        log_bytes: sizes of all other files in the run folder.
    """

    seconds: float
    mebibytes: float
    files: int
    threads: int
    checkpoint_files: int
    checkpoint_bytes: int
    log_bytes: int


def sample(root: int, folder: Path, seconds: float) -> ResourceSample:
    """Return what a job holds now.

    Args:
        root: its first process.
        folder: its run folder.
        seconds: see `ResourceSample`.
    """
    processes = family(root)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for place, _, names in os.walk(folder):  # which passes over a folder that has just been renamed
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(OSError):  # it has just been removed
                parts = path.relative_to(folder).parts
                sizes[parts[0] == "checkpoints" or parts[0].isdigit()].append(path.stat().st_size)
    return ResourceSample(
        seconds=round(seconds, 1),
        mebibytes=round(memory(processes) / 2**20, 1),
        files=sum(_entries(process, "fd") for process in processes),
        threads=sum(_entries(process, "task") for process in processes),
        checkpoint_files=len(sizes[True]),
        checkpoint_bytes=sum(sizes[True]),
        log_bytes=sum(sizes[False]),
    )


def _entries(process: int, kind: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{process}/{kind}").iterdir())
    return 0
