"""Find and kill the descendants of a process; on Linux only, elsewhere none are found."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


def family(root: int) -> set[int]:
    """Return a process and its descendants."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def keep_family() -> None:
    """Let processes whose parents end become children of this one, so that daemons stay in its family."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_family(root: int) -> None:
    """Kill the descendants of a process, and the process group that it leads."""
    for process in family(root) - {root}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    kill_group(root)


def kill_group(leader: int) -> None:
    """Kill a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
