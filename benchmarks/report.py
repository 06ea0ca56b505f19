"""Record of a benchmark and its text."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.contenders import COMPARISONS, LABELS, PMAP, PMAP_ONE, TORCH
from jaxddp.config import TrainConfig

SLOWEST = 1 / 1.05  # times the hand-written steps per second: a step takes at most 5 % longer
FASTER_THAN_TORCH = 3.0  # times torch's steps per second, at 2 replicas
WIDTH = 38


def provenance(command: str, device: jax.Device) -> dict[str, Any]:
    """Return command, date, hardware, load and package versions."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "torch")
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device.platform,
        "hardware": f"{_cpu()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind,
        "gpu": device.device_kind if device.platform != "cpu" else "not measured",
        "torch_backend": "gloo" if device.platform == "cpu" else "nccl",
        "load_average_before": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def describe_job(config: TrainConfig, world_sizes: Sequence[int]) -> str:
    """Describe the job, and the batch that all world sizes share."""
    shares = ", ".join(f"{config.per_replica_batch_size(w)} at {w}" for w in world_sizes)
    return (
        f"{config.dataset}, {config.model}, {config.optimizer}, {config.dtype}; held fixed: "
        f"{config.global_batch_size} examples per step over all replicas (per replica: {shares})"
    )


def aims(ratios: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """List jaxddp's aims and whether they are met."""
    results = []
    for ratio in ratios:
        name, replicas, speed = ratio["other"], ratio["replicas"], ratio["median"]
        if name in (PMAP, PMAP_ONE):
            aim = f"{_replicas(replicas)}: {ratio['jaxddp']}, takes at most 5 % longer than {name}"
            is_now = f"{100 * (1 / speed - 1):+.0f} %"
            results.append({"aim": aim, "is": is_now, "met": speed >= SLOWEST})
        elif name == TORCH and replicas == 2:
            aim = f"{_replicas(replicas)}: {ratio['jaxddp']}, makes at least {FASTER_THAN_TORCH:.0f} x {name}'s steps"
            results.append({"aim": aim, "is": f"{speed:.1f} x", "met": speed >= FASTER_THAN_TORCH})
    return results


def text(record: dict[str, Any]) -> str:
    """Format the record as tables."""
    world_sizes = [int(w) for w in record["programs"]]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"The default training job: {record['job']}.",
        f"Each ran its first {record['optimizer_steps']} optimizer steps {record['rounds']} times, in turns: "
        "shuffle, gather, place, step, read metrics late.",
        "",
        *_speeds(record, world_sizes),
        *_ratios(record, world_sizes),
        "",
        *_programs(record, world_sizes),
        "",
        "aims",
        *(f"  {'met   ' if aim['met'] else 'MISSED'}  {aim['aim']}: {aim['is']}" for aim in record["aims"]),
        "",
        f"{record['date']}, {record['hardware']}, load before {record['load_average_before']}, {versions} "
        f"({record['torch_backend']}); GPU: {record['gpu']}",
    ]
    return "\n".join(lines)


def _speeds(record: dict[str, Any], world_sizes: Sequence[int]) -> list[str]:
    speeds = {(c["name"], c["replicas"]): f"{c['steps_per_second']['median']:.0f}" for c in record["contenders"]}
    rows = [_row("steps per second, median of rounds", [_replicas(w) for w in world_sizes])]
    rows += [_row("  " + name, [speeds.get((name, w), "") for w in world_sizes]) for name in LABELS[:5]]
    rows += [_row("  " + name, [speeds[name, 1]]) for name in LABELS[5:]]
    chunks = "/".join(str(steps) for steps in record["steps_per_dispatch"].values())
    return [*rows, f'  ("as it comes" and "scan": {chunks} steps per dispatch)']


def _ratios(record: dict[str, Any], world_sizes: Sequence[int]) -> list[str]:
    cells = {
        (r["jaxddp"], r["other"], r["replicas"]): f"{r['median']:.2f} ({r['min']:.2f}..{r['max']:.2f})"
        for r in record["ratios"]
    }
    rows = []
    for ours, others in COMPARISONS.items():
        rows += ["", _row(f"{ours}: steps per second relative to (median, min..max)", [])]
        for other in others:
            rows.append(_row("  " + other, [cells[ours, other, w] for w in world_sizes]))
    return rows


def _programs(record: dict[str, Any], world_sizes: Sequence[int]) -> list[str]:
    names = {
        "all_reduces_per_step": "  all-reduces per optimizer step",
        "all_reduced_bytes_per_step": "  bytes all-reduced per replica and step",
        "gradient_bytes": "  bytes of the gradients",
    }
    programs = [record["programs"][str(w)] for w in world_sizes]
    rows = [_row("read from jaxddp's compiled program", [_replicas(w) for w in world_sizes])]
    return rows + [_row(label, [f"{program[name]:,}" for program in programs]) for name, label in names.items()]


def _replicas(count: int) -> str:
    return f"{count} replica" + "s" * (count > 1)


def _row(label: str, cells: Sequence[str]) -> str:
    return (label.ljust(WIDTH + 2) + "".join(cell.rjust(22) for cell in cells)).rstrip()
