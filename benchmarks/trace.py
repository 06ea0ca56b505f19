"""Trace of a few steps by jax's profiler, and the kernels in it.

A trace is the JSON that `jax.profiler` writes for Perfetto, in the "Trace Event Format" of the Chromium project:
metadata name processes ("/device:GPU:0") and threads ("Stream #13(Compute)"), and events of phase "X" have a begin and
a duration in microseconds.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

Trace = Mapping[str, Any]

STEPS, WARM_UP = 5, 3
GPU = "/device:GPU:"
STREAM, COMPUTE = "Stream #", "Compute"


@dataclass(frozen=True)
class Kernel:
    """A kernel on a device, with its times in microseconds."""

    name: str
    begin: float
    end: float


def traced(steps: Callable[[int], Any], folder: Path) -> dict[str, Any]:
    """Trace `STEPS` steps after a warm-up; return the trace without its metadata, which Perfetto does not like.

    Args:
        steps: takes so many steps, and waits for them.

    Raises:
        FileNotFoundError: the profiler has written no trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the file
    steps(WARM_UP)
    with jax.profiler.trace(str(folder), profiler_options=options):
        steps(STEPS)
    paths = sorted(folder.rglob("*.trace.json.gz"))
    if not paths:
        raise FileNotFoundError("the profiler wrote no trace.json.gz")
    with gzip.open(paths[0]) as file:
        found = json.load(file)
    return {name: part for name, part in found.items() if name != "metadata"}


def kernels(trace: Trace) -> dict[str, list[Kernel]]:
    """Return the kernels of each GPU's compute streams; in a trace without GPUs, what XLA ran on the CPU."""
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    gpus = {pid: name for pid, name in processes.items() if name.startswith(GPU)}
    of_gpus = {place: name for place, name in threads.items() if place[0] in gpus and name.startswith(STREAM)}
    # Streams say what they carry where the profiler knows it.
    computing = {place for place, name in of_gpus.items() if COMPUTE in name} or set(of_gpus)
    found: dict[str, list[Kernel]] = {}
    for event in _complete(trace):
        place = event["pid"], event.get("tid")
        if place in computing or (not gpus and "hlo_op" in event.get("args", {})):
            kernel = Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
            found.setdefault(processes.get(event["pid"], "device"), []).append(kernel)
    return found


def _complete(trace: Trace) -> Iterator[Mapping[str, Any]]:
    return (event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event)
