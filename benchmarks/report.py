"""Text of a benchmark's record."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.contenders import JAXDDP, LABELS
from benchmarks.workloads import workloads

Record = Mapping[str, Any]
CELL = 14


def text(record: Record) -> str:
    """Format the record as tables."""
    sections = [
        *_speed(record.get("races", [])),
        *_programs(record.get("races", [])),
        *_jobs(record),
        *_growth(record),
        *_targets(record["targets"]),
        _origin(record),
    ]
    return "\n".join(sections)


def _speed(races: Sequence[Record]) -> Iterator[str]:
    races = [race for race in races if race["ratios"]]
    if not races:
        return
    others = [name for name in LABELS if name != JAXDDP and any(name in race["contenders"] for race in races)]
    yield "milliseconds per optimizer step of jaxddp, and times as long that each other takes for the same step"
    yield "(median of rounds ± half the range; above 1, jaxddp is faster)"
    yield _row("workload", ["replicas", "K", "jaxddp ms", *others])
    for race in races:
        ours = race["contenders"][JAXDDP]["seconds_per_step"]
        cells = [str(race["replicas"]), str(race["steps_per_batch"]), f"{1e3 * ours['median']:.4g}"]
        yield _row(race["workload"], [*cells, *(_cell(race, name) for name in others)])
    yield ""
    described = {name: workload.description for name, workload in workloads().items()}
    seen = dict.fromkeys((race["workload"], race["examples_per_step"]) for race in races)
    yield from (f"  {name:15} {described.get(name, '')}; {batch} examples per step" for name, batch in seen)
    yield "  K               steps per batch of jaxddp's loader; with convolutions each is a dispatch"
    yield from (f"  {name:15} {LABELS[name]}" for name in (JAXDDP, *others))
    yield from _failures(races)
    yield ""


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
                yield f"  failed: {name} of {race['workload']}, {race['replicas']} replicas: {contender['failure']}"


def _programs(races: Sequence[Record]) -> Iterator[str]:
    races = [race for race in races if "program" in race]
    if not races:
        return
    yield "inside jaxddp"
    heads = [
        "replicas",
        "all-reduces",
        "bytes",
        "of gradients",
        "of buffers",
        "evaluation",
        "input us",
        "x step rate",
        "traces",
    ]
    yield _row("workload", heads)
    for race in races:
        program, pipeline = race["program"], race["input"]
        traces = race.get("traces")
        yield _row(
            race["workload"],
            [
                str(race["replicas"]),
                str(program["all_reduces_per_step"]),
                f"{program['bytes_per_step']:,}",
                f"{program['gradient_bytes']:,}",
                f"{program['buffer_bytes']:,}",
                f"{program['evaluation_bytes']:,}" if "evaluation_bytes" in program else "",
                f"{1e6 * pipeline['seconds_per_step']:.0f}",
                f"{pipeline['times_step_rate']:.3g}",
                f"{traces['first_epoch']}, {traces['second_epoch']}" if traces else "",
            ],
        )
    yield "  all-reduces and bytes per replica and step, bytes of an evaluation, from the compiled programs; the input"
    yield "  pipeline alone, per step; programs traced in the first and second epoch"
    yield ""


def _jobs(record: Record) -> Iterator[str]:
    if "jobs" not in record:
        return
    yield "the default job in a fresh process, median"
    yield _row("", ["first epoch s", "end s", "peak MB"], width=22)
    for name, job in record["jobs"].items():
        values = job["seconds_to_first_epoch"], job["seconds_to_end"], job["peak_megabytes"]
        yield _row(f"  {name}", [f"{value:,.4g}" for value in values], width=22)
    costs = record["costs"]
    names = ("verification", "evaluation", "log", "checkpoint")
    shares = ", ".join(
        f"{name} {100 * costs[f'{name}_share']:.1f} % ({1e3 * costs[f'{name}_seconds']:.3g} ms)" for name in names
    )
    yield f"  share of the time of an epoch's steps ({1e3 * costs['epoch_seconds']:.3g} ms): {shares}"
    yield ""


def _growth(record: Record) -> Iterator[str]:
    if "growth" not in record:
        return
    growth = record["growth"]
    yield "growth"
    heads = ["", "jaxddp ms", "pmap by hand", "compiled in s"]
    yield _row("", heads, width=22)
    for kind in ("parameters", "leaves", "replicas"):
        for row in growth[kind]:
            by_hand = f"{row['ratios']['pmap']['median']:.3g}"
            cells = [f"{row[kind]:,}", f"{1e3 * row['seconds_per_step']:.4g}", by_hand, f"{row['setup_seconds']}"]
            yield _row(f"  {kind}", cells, width=22)
    yield _row("  rows", ["", "shuffle s", "epoch wait s", "batch wait s"], width=22)
    for row in growth["rows"]:
        waits = row["wait_between_epochs_seconds"], row["wait_between_batches_seconds"]
        cells = [f"{row['rows']:,}", *(f"{value:.3g}" for value in (row["shuffle_seconds"], *waits))]
        yield _row("", cells, width=22)
    yield ""


def _targets(rows: Sequence[Record]) -> Iterator[str]:
    yield "targets"
    for row in rows:
        state = {True: "met   ", False: "MISSED", None: "-     "}[row["met"]]
        limit = f"{'at least' if row['at_least'] else 'at most'} {row['limit']:g}"
        yield f"  {state}  {row['id']:3} {limit:14} {row['text']}: {_value(row)}"
    yield ""


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


def _row(label: str, cells: Sequence[str], width: int = 15) -> str:
    return (label.ljust(width) + "".join(cell.rjust(CELL) for cell in cells)).rstrip()
