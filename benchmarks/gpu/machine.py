"""Part `machine`: what the machine is, and the rates that it reaches in each framework."""

import importlib.metadata
import os
import platform
from functools import partial

from benchmarks.gpu import gpus, part
from benchmarks.gpu.children import ask
from benchmarks.gpu.records import Record, Row

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "numpy", "torch", "triton"),
    *("transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)


def measure(record: Record) -> None:
    """Describe the machine, and measure matrix products, memory copies and all-reduces."""
    record.add("hardware", hardware)
    record.add("versions", versions)
    words = ["--smoke"] if record.smoke else []
    for framework in ("jax", "torch"):
        record.add(framework, partial(ask, f"benchmarks.gpu.rates_{framework}", words))


def hardware() -> Row:
    """Return what the system says of its processor and GPUs."""
    return {**gpus.description(), "cores": os.cpu_count(), "processor": platform.machine()}


def versions() -> Row:
    """Return the versions of Python and of the packages that are installed."""
    found: Row = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    part.run("machine", measure)
