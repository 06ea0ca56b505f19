"""Limits of memory that the shell sets for the processes that it starts."""

import resource

from jaxddp.errors import InputError

# Bytes of address space (ulimit -v) with which a run can start. Measured, for the default job with --output: jax 1.78
# GiB with 4 threads and 1.94 with 16, torch 1.05 to 1.19 GiB. Larger models take more.
LEAST_FOR_JAX, PER_THREAD = 7 * 2**28, 2**24
LEAST_FOR_TORCH = 5 * 2**28
_KINDS = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}


def ulimits() -> dict[str, int]:
    """Return the limits of this process that are set, in bytes: -v of its address space, -d of its data."""
    limits = {name: resource.getrlimit(kind)[0] for name, kind in _KINDS.items()}
    return {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}


def check_address_space(least: int) -> None:
    """Raise `InputError` if `ulimit -v` is below `least` bytes: libraries would not load, or XLA would abort."""
    limit = ulimits().get("ulimit -v")
    if limit is not None and limit < least:
        raise InputError(f"ulimit -v {limit // 1024}: must be at least {least // 1024} (kB), or unlimited")
