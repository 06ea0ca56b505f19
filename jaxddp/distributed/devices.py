"""Devices of a run: local GPUs, or CPU devices with enough threads not to deadlock."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import jax

from jaxddp.config.choices import DEFAULT_CPU_DEVICES, MOST_CPU_DEVICES
from jaxddp.config.options import Platform
from jaxddp.config.ranges import check_range
from jaxddp.config.ulimits import LEAST_FOR_JAX, PER_THREAD, check_address_space
from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.compile_cache import keep_programs
from jaxddp.errors import InputError

MOST_THREADS = 16 * MOST_CPU_DEVICES
NO_BACKEND = (RuntimeError, AssertionError)  # of jax; the second if JAX_PLATFORMS names only what is missing


def prepare(
    devices: int | None = None, platform: Platform | None = None, cluster: Cluster | None = None
) -> list[jax.Device]:
    """Start jax for a data-parallel run and return its devices, one per replica.

    Call it before any other use of jax: the number of CPU devices and the size of XLA's
    thread pool are fixed when the backend starts. Compiled programs are kept for later runs, see
    `jaxddp.distributed.compile_cache`.

    Args:
        devices: number of devices over all processes, the same in each. None: all local GPUs of each
            process, or `DEFAULT_CPU_DEVICES` CPU devices, one for each process of several.
        platform: "cpu", "gpu", or None for GPUs if there are any.
        cluster: the processes of the run, which have joined already; None: there is only this process.

    Raises:
        InputError: `devices` is below 1, exceeds the available devices or cannot be divided among the processes, the
            platform has none, or `ulimit -v` or a variable of the environment (JAX_PLATFORMS, PJRT_NPROC, XLA_FLAGS)
            does not let jax start.

    >>> len(prepare(2, "cpu"))
    2
    """
    check_range("devices", devices, f"--devices {devices}")
    processes = 1 if cluster is None else cluster.num_processes
    if devices is not None and devices % processes:
        raise InputError(f"--devices {devices}: must be divisible by {processes} processes")
    _check_xla_flags(os.environ.get("XLA_FLAGS", ""))
    keep_programs()
    wanted = None if devices is None else devices // processes
    cpu_devices = min(wanted or (DEFAULT_CPU_DEVICES if processes == 1 else 1), MOST_CPU_DEVICES)
    prepare_cpu(cpu_devices)
    gpus = [] if platform == "cpu" else _gpus(cluster, required=platform == "gpu")
    here = gpus or _cpus()
    kind = here[0].platform
    default = min(cpu_devices, len(here)) if kind == "cpu" else len(here)
    if (wanted or 0) > len(here):
        raise InputError(f"--devices {devices}: {_supply(kind, len(here))}")
    if cluster is None:
        return list(here[: wanted or default])
    return _of_all_processes(kind, wanted or default)


@functools.cache
def _check_xla_flags(flags: str) -> None:
    """Raise `InputError` for flags with which XLA would abort this process; a child process tries them, in 0.3 s."""
    if not flags:
        return
    command = [sys.executable, "-c", "from jaxlib.xla_client import CompileOptions; CompileOptions()"]
    printed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stderr
    if problem := re.search(r"^[EF]\d{4} .*?\] (.*)", printed, re.MULTILINE):
        raise InputError(f"XLA_FLAGS={flags}: {problem[1]}")


def _of_all_processes(kind: str, count: int) -> list[jax.Device]:
    """Return `count` devices of each process, in the order of the processes."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices(kind):
        by_process.setdefault(device.process_index, []).append(device)
    counts = {process: len(devices) for process, devices in sorted(by_process.items())}
    if min(counts.values()) < count:
        few = min(counts, key=lambda process: counts[process])
        raise InputError(f"process {few} has {counts[few]} devices, this process {count}; choose --devices")
    return [device for process in counts for device in by_process[process][:count]]


def prepare_cpu(devices: int) -> None:
    """Request CPU devices and enough threads for them, if jax has not started yet.

    A program that runs holds a thread per device, until all replicas have arrived at its all-reduce. With 32 programs
    in flight, the launch of another one holds a thread per device too. With fewer than 2 threads per device, the
    replicas then wait for each other forever, and XLA aborts the process after 40 seconds. More threads than that are
    not better: XLA divides every operation among all of them, on however few cores.
    """
    if _threads() < 2 * devices:
        os.environ["PJRT_NPROC"] = str(2 * devices)
    check_address_space(LEAST_FOR_JAX + _threads() * PER_THREAD)
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


def _gpus(cluster: Cluster | None, required: bool) -> Sequence[jax.Device]:
    """Return this process's GPUs: one of several processes on a machine takes the GPU with its number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cluster is not None and cluster.local_id is not None and (visible is None or "," in visible):
        jax.config.update("jax_cuda_visible_devices", str(cluster.local_id))
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
        running = f"jax is already running with {count} CPU device{'s' * (count != 1)}"
        return f"{running}; call jaxddp.prepare before anything else uses jax, as a program's top level may"
    return f"there are {count} local GPUs; --platform cpu prepares up to {MOST_CPU_DEVICES} CPU devices"


def most_memory(devices: Sequence[jax.Device], statistic: str = "bytes_in_use") -> int | None:
    """Return the largest of the devices' numbers of bytes; None where the platform does not count them, as on CPUs.

    Args:
        devices: those of other processes are left out.
        statistic: name in `jax.Device.memory_stats`.

    >>> most_memory(prepare(2, "cpu")) is None
    True
    """
    found = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
    return max((stats[statistic] for stats in found if statistic in stats), default=None)
