"""Compare the memory a run needs with what it may use, before the kernel kills the process without a message."""

import contextlib
import os
from pathlib import Path

from jaxddp.config.ulimits import ulimits
from jaxddp.errors import InputError

CGROUP = Path("/sys/fs/cgroup/memory.max")  # limit of a container


def check_memory(where: str, needed: int) -> None:
    """Raise `InputError` if this process may use less memory than `needed` bytes.

    Args:
        where: the flags that determine the size, with their values, and what it is.

    >>> try:
    ...     check_memory("--num-examples 1000000000: the examples", 10**15)
    ... except InputError as error:
    ...     print(str(error).rpartition(",")[0])
    --num-examples 1000000000: the examples take 931,323 GiB
    """
    if needed > (most := memory()):
        giver = next((words for words, limit in _limits().items() if limit == most), "this machine has")
        raise InputError(f"{where} take {needed / 2**30:,.0f} GiB, and {giver} {most / 2**30:,.0f} GiB")


def memory() -> int:
    """Return the bytes of memory that this process may use, at most."""
    return min(_limits().values())


def _limits() -> dict[str, int]:
    limits = {"this machine has": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limits["this container may use"] = int(CGROUP.read_text())
    return limits | {f"`{name}` allows": limit for name, limit in ulimits().items()}
