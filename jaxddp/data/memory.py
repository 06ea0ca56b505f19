"""Compare the memory a run needs with what the machine has, and warn before the kernel kills the process."""

import os
from pathlib import Path

from jaxddp.errors import InputError

CGROUP = Path("/sys/fs/cgroup/memory.max")  # limit of a container


def check_memory(where: str, needed: int) -> None:
    """Raise `InputError` if the machine has less memory than `needed` bytes.

    Args:
        where: the flags that determine the size, with their values, and what it is.

    >>> try:
    ...     check_memory("--num-examples 1000000000: the examples", 10**15)
    ... except InputError as error:
    ...     print(str(error).rpartition(",")[0])
    --num-examples 1000000000: the examples take 931,323 GiB
    """
    if needed > (present := memory()):
        raise InputError(f"{where} take {needed / 2**30:,.0f} GiB, and this machine has {present / 2**30:,.0f} GiB")


def memory() -> int:
    """Return the bytes of memory that this process may use, at most."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return physical
