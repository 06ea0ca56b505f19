"""NVIDIA GPUs of this machine, as nvidia-smi describes them, and versions; needs neither jax nor torch."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from typing import Any

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "numpy", "torch", "triton"),
    *("transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_QUERY = (
    *("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.max.mem"),
    *("power.limit", "power.draw", "temperature.gpu"),
)


def smi(*words: str) -> str | None:
    """Return what `nvidia-smi WORDS` prints; None if there is no such command, or it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def names() -> list[str]:
    """Return the names of the GPUs that programs may use, which CUDA_VISIBLE_DEVICES can restrict."""
    listed = re.findall(r"^GPU \d+: (.*?) \(UUID", smi("-L") or "", re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    return listed[: len([word for word in visible.split(",") if word.strip() not in ("", "-1")])]


def short(gpus: Sequence[str]) -> str:
    """Return a name of the GPUs for a folder.

    >>> short([]), short(["NVIDIA H200"]), short(["NVIDIA H100 80GB HBM3"] * 8)
    ('cpu', 'nvidia-h200', '8x-nvidia-h100-80gb-hbm3')
    """
    if not gpus:
        return "cpu"
    word = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return word if len(gpus) == 1 else f"{len(gpus)}x-{word}"


def measure() -> dict[str, Any]:
    """Return the date, and what the system says of processor, GPUs, clocks, power, driver, links, and packages."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    row: dict[str, Any] = {"date": date, "cores": os.cpu_count(), "processor": platform.machine(), "gpus": []}
    if (table := smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv")) is not None:
        head, *gpus = ([cell.strip() for cell in line.split(",")] for line in table.strip().splitlines())
        row |= {
            "gpus": [dict(zip(head, gpu, strict=False)) for gpu in gpus],
            "topology": (smi("topo", "-m") or "").splitlines(),
        }
    versions = {"python": {"version": platform.python_version()}}
    for distribution in importlib.metadata.distributions():
        if (name := distribution.metadata["Name"]) in PACKAGES:
            versions[name] = {"version": distribution.version}
    return {**row, "versions": versions}
