"""Text of a benchmark's record."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.contenders import JAXDDP, LABELS
from benchmarks.tables import table, tables
from benchmarks.workloads import workloads

Record = Mapping[str, Any]
INSIDE = ("program", "input", "traces")  # parts of a race that its contenders do not share
READ = {"images": "images of 224x224 decoded per second", "tokens": "windows of 1,024 tokens read per second"}
NOTES = """all-reduces and bytes are per replica and step, and bytes of an evaluation, read from the compiled programs;
input: the pipeline alone, per step; traces: programs traced in the first and second epoch"""


def text(record: Record) -> str:
    """Format the record as tables."""
    races = record.get("races", [])
    sections = [*_speed([race for race in races if race["ratios"]])]
    if inside := {
        _title(race): {key: race[key] for key in INSIDE if key in race} for race in races if INSIDE[0] in race
    }:
        sections += ["inside jaxddp", *tables(inside), NOTES]
    if "jobs" in record:
        sections += ["the default job in a fresh process, median", *tables(record["jobs"])]
        sections += ["seconds besides the steps of an epoch, and their shares", *tables({"": record["costs"]})]
    for kind, rows in record.get("growth", {}).items():
        sections += tables({f"{row[kind]:,}": _grown(row) for row in rows}, f"more {kind}")
    for kind, rates in record.get("reading", {}).items():
        sections += tables(rates, READ[kind])
    return "\n\n".join([*sections, "targets", _targets(record["targets"]), _origin(record)])


def _grown(row: Record) -> Record:
    ratios = {f"{name} over jaxddp": ratio["median"] for name, ratio in row.get("ratios", {}).items()}
    return {**{key: value for key, value in row.items() if key != "ratios"}, **ratios}


def _title(race: Record) -> str:
    return f"{race['workload']} x{race['replicas']}"


def _speed(races: Sequence[Record]) -> Iterator[str]:
    if not races:
        return
    others = [name for name in LABELS if name != JAXDDP and any(name in race["contenders"] for race in races)]
    yield (
        "milliseconds per optimizer step of jaxddp, and times as long that each other takes for the same step\n"
        "(median of rounds ± half the range; above 1, jaxddp is faster)"
    )
    rows = []
    for race in races:
        ours = race["contenders"][JAXDDP]["seconds_per_step"]["median"]
        cells = [race["workload"], race["replicas"], race["steps_per_batch"], f"{1e3 * ours:.4g}"]
        rows.append([*cells, *(_cell(race, name) for name in others)])
    yield table(["workload", "replicas", "K", "jaxddp ms", *others], rows, aligned=True)
    described = {name: workload.description for name, workload in workloads().items()}
    seen = dict.fromkeys((race["workload"], race["examples_per_step"]) for race in races)
    lines = [f"{name:15} {described.get(name, '')}; {batch} examples per step" for name, batch in seen]
    lines += ["K               steps per batch of jaxddp's loader; with convolutions each is a dispatch"]
    lines += [f"{name:15} {LABELS[name]}" for name in (JAXDDP, *others)]
    yield "\n".join([*lines, *_failures(races)])


def _cell(race: Record, name: str) -> str:
    if name in race["ratios"]:
        ratio = race["ratios"][name]
        spread = f" ±{_short((ratio['max'] - ratio['min']) / 2)}" if len(race["contenders"][name]["rounds"]) > 1 else ""
        return f"{_short(ratio['median'])}{spread}"
    return "failed" if name in race["contenders"] else ""


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _failures(races: Sequence[Record]) -> Iterator[str]:
    for race in races:
        for name, contender in race["contenders"].items():
            if "failure" in contender:
                yield f"failed: {name} of {race['workload']}, {race['replicas']} replicas: {contender['failure']}"


def _targets(rows: Sequence[Record]) -> str:
    state = {True: "met", False: "MISSED", None: "-"}
    lines = [
        [state[row["met"]], row["id"], f"{'at least' if row['at_least'] else 'at most'} {row['limit']:g} {row['text']}"]
        for row in rows
    ]
    cells = ([*line, _value(row)] for line, row in zip(lines, rows, strict=True))
    return table(["", "", "target", "value"], cells, aligned=True)


def _value(row: Record) -> str:
    if row["value"] is None:
        return "not measured"
    missed = {name: value for name, value in row["missed_by"].items() if name != row["of"]}
    others = f"; also missed: {', '.join(f'{name} {value:.4g}' for name, value in missed.items())}" if missed else ""
    return f"{row['value']:.4g} ({row['of']}){others}"


def _origin(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{record['date']}, {record['hardware']}, load before {record['load_average_before']}, {versions} "
        f"({record['torch_backend']}); GPU: {record['gpu']}; {record['seconds']:.0f} s; {record['command']}"
    )
