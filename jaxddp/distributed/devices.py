"""Picks the devices of a run: local GPUs, or CPU devices prepared so that they cannot deadlock."""

import contextlib
import os
from collections.abc import Sequence

import jax

from jaxddp.config.choices import DEFAULT_CPU_DEVICES
from jaxddp.errors import InputError


def prepare(devices: int | None = None, platform: str | None = None) -> list[jax.Device]:
    """Start jax for a data-parallel run and return its devices, one per replica.

    Call it before anything else touches jax: the number of CPU devices and the size of
    XLA's thread pool are fixed when the backend starts.

    Args:
        devices: how many. None: all local GPUs, or `DEFAULT_CPU_DEVICES` CPU devices.
        platform: "cpu", "gpu", or None for GPUs where there are any.

    Raises:
        InputError: there are fewer devices than asked for, none of that platform, or none asked for.

    >>> len(prepare(2, "cpu"))
    2
    """
    if devices is not None and devices < 1:
        raise InputError(f"--devices {devices}: must be at least 1")
    cpu_devices = DEFAULT_CPU_DEVICES if devices is None else devices
    _prepare_cpu(cpu_devices)
    gpus = [] if platform == "cpu" else _gpus(required=platform == "gpu")
    available = gpus or jax.local_devices(backend="cpu")
    kind = available[0].platform
    default = min(cpu_devices, len(available)) if kind == "cpu" else len(available)
    wanted = default if devices is None else devices
    if wanted > len(available):
        raise InputError(f"--devices {wanted}: {_supply(kind, len(available))}")
    return list(available[:wanted])


def _prepare_cpu(devices: int) -> None:
    """Ask for CPU devices and enough threads for them, if jax has not started yet.

    An all-reduce holds one thread per device until all have come. With fewer threads than
    devices in flight the replicas wait for each other for ever, and XLA ends the process
    after 40 seconds; 2 threads a device are just not enough, 4 are ample.
    """
    threads = 4 * devices
    if int(os.environ.get("PJRT_NPROC") or 0) < threads:
        os.environ["PJRT_NPROC"] = str(threads)
    with contextlib.suppress(RuntimeError):  # jax runs already (a notebook): its devices are what there is
        jax.config.update("jax_num_cpu_devices", devices)


def _gpus(required: bool) -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError as error:
        if required:
            message = "--platform gpu: jax finds no GPU here; install jax[cuda12], or use --platform cpu"
            raise InputError(message) from error
        return []


def _supply(kind: str, count: int) -> str:
    if kind == "cpu":
        return f"jax was started with {count} CPU devices before; call jaxddp.prepare before anything else uses jax"
    return f"there are {count} local GPUs; --platform cpu prepares any number of CPU devices"
