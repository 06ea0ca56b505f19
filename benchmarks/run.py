"""A benchmark from its first part to its record and text."""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import growth, measures, reading, report, speed, targets
from benchmarks.apart import process
from benchmarks.contenders import ALL_PEERS_AT
from benchmarks.provenance import provenance
from benchmarks.smoke import compile_faster
from benchmarks.speed import Heat
from benchmarks.workloads import workloads
from jaxddp import TrainConfig
from jaxddp.config.options import Platform
from jaxddp.errors import InputError
from jaxddp.files import check_files, write_atomically

if TYPE_CHECKING:
    from benchmarks.__main__ import RaceOptions

SMOKE_PEERS = ("mlp",)  # workloads that all peers train in a smoke run
SMOKE_SECONDS = 0.01  # of a turn in a smoke run
REPEATS = 3  # at most, of the default job in fresh processes
FEW_ROUNDS = 3  # at most, of growth and of races without a target


def run(options: "RaceOptions", command: str) -> dict[str, Any]:
    """Run the benchmark, print it, and return its record."""
    started = time.perf_counter()
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        check_files({"--output": (options.output, rb'\{\s*"command": "python -m benchmarks')})
    if options.smoke:
        compile_faster()
    record, sizes = _begin(options, command)
    heats = plan(options, sizes)
    record["races"] = []
    for replicas in sizes:
        with process(replicas, record["device"]) as call:
            for heat in (heat for heat in heats if heat.replicas == replicas):
                record["races"].append(call(speed.measure, heat))
                _keep(options, record, started, heat.title)
    if "measures" in options.parts:
        record |= _measures(options, record["device"])
        _keep(options, record, started, "the default job")
    if "growth" in options.parts:
        rounds, turn = min(_rounds(options), FEW_ROUNDS), _seconds(options)
        record["growth"] = growth.measure(_inside_at(sizes), record["device"], rounds, turn, options.smoke)
        _keep(options, record, started, "growth")
    if "reading" in options.parts:
        record["reading"] = reading.measure(min(_rounds(options), FEW_ROUNDS), 10 * _seconds(options), options.smoke)
        _keep(options, record, started, "reading")
    print(report.text(record))
    return record


def _keep(options: "RaceOptions", record: dict[str, Any], started: float, what: str) -> None:
    """Say what has ended, and write the record, so that a run that is ended early loses one race at most."""
    record |= {"targets": targets.rows(record), "rounds": _rounds(options)}
    record["seconds"] = round(time.perf_counter() - started, 1)
    print(f"{record['seconds']:6.0f} s  {what}", file=sys.stderr, flush=True)
    if options.output is not None:
        write_atomically(options.output, f"{json.dumps(record, indent=2)}\n".encode())


def plan(options: "RaceOptions", sizes: list[int]) -> list[Heat]:
    """List the races."""
    inside_at = _inside_at(sizes)
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


def _measures(options: "RaceOptions", platform: Platform) -> dict[str, Any]:
    flags = ["--platform", platform, *(["--epochs", "1"] if options.smoke else [])]
    jobs = measures.jobs(min(_rounds(options), REPEATS), flags)
    with process(None, platform) as call:
        return {"jobs": jobs, "costs": call(measures.costs, TrainConfig(platform=platform))}


def _rounds(options: "RaceOptions", replicas: int = ALL_PEERS_AT) -> int:
    """Return the rounds; fewer where no target is."""
    rounds = 1 if options.smoke else options.rounds
    return rounds if replicas <= ALL_PEERS_AT else min(rounds, FEW_ROUNDS)


def _seconds(options: "RaceOptions") -> float:
    return SMOKE_SECONDS if options.smoke else options.seconds


def _inside_at(sizes: Sequence[int]) -> int:
    """Return the number of replicas at which more is measured than a race."""
    return ALL_PEERS_AT if ALL_PEERS_AT in sizes else sizes[-1]


def _begin(options: "RaceOptions", command: str) -> tuple[dict[str, Any], list[int]]:
    """Return the record's first entries, and the numbers of replicas that fit on the devices."""
    asked = [ALL_PEERS_AT] if options.smoke else sorted(set(options.devices))
    with process(None, options.platform) as call:
        found = call(_origin, command)  # before the run, whose load does not count
    available = found.pop("devices")
    sizes = asked if found["device"] == "cpu" else [count for count in asked if count <= available]
    if not sizes:
        raise InputError(f"--devices {' '.join(map(str, options.devices))}: there are {available} devices")
    return found, sizes


def _origin(devices: Sequence[jax.Device], command: str) -> dict[str, Any]:
    return {"devices": len(devices), **provenance(command, devices[0])}
