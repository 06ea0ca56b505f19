"""Devices of a run: local GPUs, or CPU devices with enough threads not to deadlock."""

import contextlib
import os
from collections.abc import Sequence

import jax

from jaxddp.config.choices import DEFAULT_CPU_DEVICES, MOST_CPU_DEVICES
from jaxddp.config.ranges import check_range
from jaxddp.distributed.compile_cache import keep_programs
from jaxddp.errors import InputError

MOST_THREADS = 16 * MOST_CPU_DEVICES
NO_BACKEND = (RuntimeError, AssertionError)  # of jax; the second if JAX_PLATFORMS names only what is missing


def prepare(devices: int | None = None, platform: str | None = None) -> list[jax.Device]:
    """Start jax for a data-parallel run and return its devices, one per replica.

    Call it before any other use of jax: the number of CPU devices and the size of XLA's
    thread pool are fixed when the backend starts. Compiled programs are kept for later runs, see
    `jaxddp.distributed.compile_cache`.

    Args:
        devices: number of devices. None: all local GPUs, or `DEFAULT_CPU_DEVICES` CPU devices.
        platform: "cpu", "gpu", or None for GPUs if there are any.

    Raises:
        InputError: `devices` is below 1 or exceeds the available devices, the platform has none, or a variable of the
            environment (JAX_PLATFORMS, PJRT_NPROC) does not let jax start.

    >>> len(prepare(2, "cpu"))
    2
    """
    check_range("devices", devices, f"--devices {devices}")
    keep_programs()
    cpu_devices = DEFAULT_CPU_DEVICES if devices is None else min(devices, MOST_CPU_DEVICES)
    _prepare_cpu(cpu_devices)
    gpus = [] if platform == "cpu" else _gpus(required=platform == "gpu")
    available = gpus or _cpus()
    kind = available[0].platform
    default = min(cpu_devices, len(available)) if kind == "cpu" else len(available)
    wanted = default if devices is None else devices
    if wanted > len(available):
        raise InputError(f"--devices {wanted}: {_supply(kind, len(available))}")
    return list(available[:wanted])


def _prepare_cpu(devices: int) -> None:
    """Request CPU devices and enough threads for them, if jax has not started yet.

    A program that runs holds a thread per device, until all replicas have arrived at its all-reduce. With 32 programs
    in flight, the launch of another one holds a thread per device too. With fewer than 2 threads per device, the
    replicas then wait for each other for ever, and XLA aborts the process after 40 seconds. More threads than that are
    not better: XLA divides every operation among all of them, on however few cores.
    """
    if _threads() < 2 * devices:
        os.environ["PJRT_NPROC"] = str(2 * devices)
    with contextlib.suppress(RuntimeError):  # jax is already running (a notebook) and keeps its devices
        jax.config.update("jax_num_cpu_devices", devices)


def _threads() -> int:
    """Return the number of threads that XLA would start: the environment's, or one per core of this process."""
    given = os.environ.get("PJRT_NPROC", "")
    if given and not (given.isdecimal() and int(given) <= MOST_THREADS):
        raise InputError(f"PJRT_NPROC={given}: must be a number of threads up to {MOST_THREADS}; or unset it")
    given = given or os.environ.get("NPROC", "")
    if given.isdecimal():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(required: bool) -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend="gpu")
    except NO_BACKEND as error:
        if required:
            message = "--platform gpu: jax finds no GPU here; install jax[cuda12], or use --platform cpu"
            raise InputError(message) from error
        return []


def _cpus() -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend="cpu")
    except NO_BACKEND as error:
        named = getattr(jax.config, "jax_platforms", None)
        if not named:
            raise
        raise InputError(f"JAX_PLATFORMS={named}: jax finds no such devices here; unset it, or use cpu") from error


def _supply(kind: str, count: int) -> str:
    """Describe the available devices and how to get more."""
    if kind == "cpu" and count == MOST_CPU_DEVICES:
        return f"must be at most {count} on the CPU"
    if kind == "cpu":
        return f"jax is already running with {count} CPU devices; call jaxddp.prepare before anything else uses jax"
    return f"there are {count} local GPUs; --platform cpu prepares up to {MOST_CPU_DEVICES} CPU devices"
