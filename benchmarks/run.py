"""A whole benchmark: devices, parts in order, record and text."""

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

from benchmarks import growth, measures, report, speed, targets
from benchmarks.contenders import ALL_PEERS_AT
from benchmarks.provenance import provenance
from benchmarks.smoke import compile_faster
from benchmarks.speed import Heat
from benchmarks.workloads import workloads
from jaxddp import TrainConfig
from jaxddp.distributed.devices import prepare
from jaxddp.errors import InputError
from jaxddp.files import write_atomically

if TYPE_CHECKING:
    from benchmarks.__main__ import Options

SMOKE_PEERS = ("mlp",)  # workloads that all peers train in a smoke run
SMOKE_SECONDS = 0.01  # of a turn in a smoke run
REPEATS = 3  # at most, of the default job in fresh processes
FEW_ROUNDS = 3  # at most, of growth and of races without a target


def run(options: "Options", command: str) -> dict[str, Any]:
    """Run the benchmark, print it, and return its record."""
    started = time.perf_counter()
    if options.smoke:
        compile_faster()
    devices, sizes = _devices(options)
    heats = plan(options, sizes)
    record = provenance(command, devices[0])  # before the run, whose own load does not count
    print(f"about {estimated_seconds(options, heats) / 60:.0f} minutes on two quiet cores", flush=True)
    # On GPUs jax would multiply float32 matrices in TF32, which keeps 10 bits; torch does not.
    with jax.default_matmul_precision("highest"), tqdm(total=_advances(options, heats), disable=None) as bar:
        advance = _shown(bar)
        record["races"] = []
        for heat in heats:
            bar.set_description(f"{heat.workload.name}, {heat.replicas} replicas")
            record["races"].append(speed.measure(heat, devices[: heat.replicas], advance))
            _finish(options, record, started, say=bar.disable)
        if "measures" in options.parts:
            record |= _measures(options, devices[0].platform, advance)
        if "growth" in options.parts:
            rounds, seconds = min(_rounds(options), FEW_ROUNDS), _seconds(options)
            record["growth"] = growth.measure(devices, rounds, seconds, options.smoke, advance)
    _finish(options, record, started, say=False)
    print(report.text(record))
    return record


def _finish(options: "Options", record: dict[str, Any], started: float, say: bool) -> None:
    """Bring the record up to date and write it, so that a run that is ended early loses one race at most."""
    record |= {"targets": targets.rows(record), "rounds": _rounds(options)}
    record["seconds"] = round(time.perf_counter() - started, 1)
    if say:  # without a terminal there is no bar
        last = record["races"][-1]
        line = f"{record['seconds']:6.0f} s  {last['workload']}, {last['replicas']} replicas"
        print(line, file=sys.stderr, flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output, f"{json.dumps(record, indent=2)}\n".encode())


def plan(options: "Options", sizes: list[int]) -> list[Heat]:
    """List the races."""
    inside_at = ALL_PEERS_AT if ALL_PEERS_AT in sizes else sizes[-1]
    measured = "measures" in options.parts
    racing = "race" in options.parts
    return [
        Heat(
            workload,
            replicas,
            rounds=_rounds(options, replicas) if racing else 0,
            seconds=_seconds(options),
            all_peers=not options.smoke or name in SMOKE_PEERS,
            inside=measured and replicas == inside_at and (not options.smoke or name in SMOKE_PEERS),
        )
        for name, workload in workloads(options.smoke).items()
        for replicas in sizes
        if name in options.workloads and (racing or (measured and replicas == inside_at))
    ]


def estimated_seconds(options: "Options", heats: list[Heat]) -> float:
    """Estimate the time of all parts, from what they took on two cores."""
    parts = {"measures": measures.SECONDS, "growth": growth.SECONDS}
    others = sum(seconds for part, seconds in parts.items() if part in options.parts)
    return sum(heat.estimated_seconds for heat in heats) + others * (0.3 if options.smoke else 1)


def _measures(options: "Options", platform: str, advance: Callable[[str], None]) -> dict[str, Any]:
    flags = ["--platform", platform, *(["--epochs", "1"] if options.smoke else [])]
    jobs = measures.jobs(min(_rounds(options), REPEATS), flags, advance)
    return {"jobs": jobs, "costs": measures.costs(TrainConfig(platform=platform))}


def _rounds(options: "Options", replicas: int = ALL_PEERS_AT) -> int:
    """Return the rounds; fewer where no target is."""
    rounds = 1 if options.smoke else options.rounds
    return rounds if replicas <= ALL_PEERS_AT else min(rounds, FEW_ROUNDS)


def _seconds(options: "Options") -> float:
    return SMOKE_SECONDS if options.smoke else options.seconds


def _advances(options: "Options", heats: list[Heat]) -> int:
    parts = {"measures": min(_rounds(options), REPEATS), "growth": growth.PARTS}
    return sum(heat.advances for heat in heats) + sum(count for part, count in parts.items() if part in options.parts)


def _shown(bar: tqdm) -> Callable[[str], None]:
    def advance(text: str) -> None:
        bar.set_postfix_str(text, refresh=False)
        bar.update()

    return advance


def _devices(options: "Options") -> tuple[list[jax.Device], list[int]]:
    """Return the devices, and the numbers of replicas that fit on them."""
    asked = [ALL_PEERS_AT] if options.smoke else sorted(set(options.replicas))
    try:
        devices = prepare(max(asked), options.platform)
    except InputError:
        devices = prepare(None, options.platform)  # too few GPUs: take all of them
    sizes = [count for count in asked if count <= len(devices)]
    if not sizes:
        raise InputError(f"--replicas {' '.join(map(str, options.replicas))}: there are {len(devices)} devices")
    return devices, sizes
