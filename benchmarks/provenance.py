"""Record the origin of a result: command, date, hardware, load and versions."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch")


def provenance(command: str, device: jax.Device) -> dict[str, Any]:
    """Return command, date, hardware, load and package versions."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device.platform,
        "hardware": f"{_cpu()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind,
        "gpu": device.device_kind if device.platform != "cpu" else "not measured",
        "torch_backend": "gloo" if device.platform == "cpu" else "nccl",
        "load_average_before": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
