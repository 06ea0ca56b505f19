"""NVIDIA GPUs of this machine, as nvidia-smi tells of them; needs neither jax nor torch."""

import os
import re
import subprocess
from collections.abc import Sequence

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

    >>> short(["NVIDIA H200"]), short(["NVIDIA H100 80GB HBM3"] * 8)
    ('nvidia-h200', '8x-nvidia-h100-80gb-hbm3')
    """
    word = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return word if len(gpus) == 1 else f"{len(gpus)}x-{word}"


def description() -> dict[str, object]:
    """Return what nvidia-smi says of clocks, power, memory, driver and links."""
    table = smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv")
    if table is None:
        return {"gpus": "no NVIDIA GPU"}
    head, *rows = ([cell.strip() for cell in line.split(",")] for line in table.strip().splitlines())
    gpus = [dict(zip(head, row, strict=False)) for row in rows]
    return {"gpus": gpus, "topology": (smi("topo", "-m") or "not available").splitlines()}
