"""Sections of the page, one per part, from the records; "not measured" where something is missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report, targets
from benchmarks.gpu import goals, runner, utilisation
from benchmarks.gpu.document import Section, Table
from benchmarks.gpu.gradients import MODES
from benchmarks.gpu.jobs import jobs
from benchmarks.gpu.rates import DTYPES
from benchmarks.gpu.records import FAILURE, UNAVAILABLE

Record = Mapping[str, Any]

MISSING = "not measured"
SMOKE = "A smoke run on CPU devices with tiny sizes: these numbers mean nothing."
LONGEST_NAME = 70  # of a kernel, whose mangled names can have hundreds of letters


def sections(records: goals.Records) -> list[Section]:
    """Return all sections; targets and the parts' states come first.

    Args:
        records: records of the parts by name; parts without one may be missing.
    """
    made = [_targets(records), _states(records)]
    for part, make in _MAKERS.items():
        record = records.get(part, {})
        section = make(record, records) if record.get("rows") else Section(_TITLES[part], [MISSING])
        reason = [f"Incomplete: {record[FAILURE]}"] if FAILURE in record else []
        made.append(Section(section.title, [*reason, *section.text], section.tables, section.printed))
    return made


def _number(value: Any, form: str = ".4g") -> str:
    return MISSING if value is None else format(value, form)


def _targets(records: goals.Records) -> Section:
    state = {True: "met", False: "missed", None: MISSING}
    rows = [
        [row["id"], f"at least {row['limit']:g} {row['text']}", _of_worst(row), state[row["met"]]]
        for row in goals.rows(records)
    ]
    notes = [SMOKE] if any(record.get("smoke") for record in records.values()) else []
    notes.append("Targets are for an H200; of two models the worse counts.")
    return Section("Targets", notes, [Table(["", "target", "value", ""], rows)])


def _of_worst(row: Record) -> str:
    return MISSING if row["value"] is None else f"{row['value']:.3g} ({row['of']})"


def _states(records: goals.Records) -> Section:
    rows = []
    for part in runner.PARTS:
        record = records.get(part, {})
        if part != runner.PAGE:
            state = "complete" if record.get("complete") else record.get(FAILURE, MISSING)
            rows.append([part, state, str(record.get("date", "")), _number(record.get("seconds"), ".0f")])
    return Section("Parts", [], [Table(["part", "state", "date", "seconds"], rows)])


def _machine(record: Record, records: goals.Records) -> Section:
    rows = record["rows"]
    hardware, versions = rows.get("hardware", {}), rows.get("versions", {})
    listed = hardware.get("gpus", MISSING)
    text = [f"{hardware.get('cores', '?')} cores, {hardware.get('processor', '?')}"]
    tables = []
    if isinstance(listed, list):
        tables.append(Table(list(listed[0]), [list(gpu.values()) for gpu in listed]))
    else:
        text.append(listed)
    text.append(", ".join(f"{name} {version}" for name, version in versions.items() if name != "took_seconds"))
    tables.append(Table(["measured", "jax", "torch"], list(_rates(rows.get("jax", {}), rows.get("torch", {})))))
    return Section(_TITLES["machine"], text, tables, "\n".join(hardware.get("topology", [])))


def _rates(jax: Record, torch: Record) -> Iterator[list[str]]:
    for dtype in DTYPES:
        values = (rates.get("matmul_tflops", {}).get(dtype) for rates in (jax, torch))
        yield [f"{dtype} matrix product, TFLOP/s", *map(_number, values)]
    for name, text in (
        ("copy_gb_per_second", "memory copy, GB/s read and written"),
        ("all_reduce_gb_per_second", "all-reduce, GB/s bus bandwidth"),
    ):
        yield [text, *(_number(rates.get(name)) for rates in (jax, torch))]


def _parity(record: Record, records: goals.Records) -> Section:
    checks, rounding, notes = [], [], []
    for name, row in record["rows"].items():
        notes += [f"{name}: {row[UNAVAILABLE]}"] if UNAVAILABLE in row else []
        for case in row.get("cases", []):
            stage = max(case["residuals"], key=lambda key: case["residuals"][key], default=None)
            worst = MISSING if stage is None else f"{case['residuals'][stage]:.0e} ({stage})"
            checks.append([case["name"], case["verdict"], worst])
            rounding += [
                [case["name"], of_stage, *(f"{far[side]:.1e}" for side in ("jax", "torch"))]
                for of_stage, far in case["rounding"].items()
            ]
    tables = [Table(["check in float64", "verdict", "largest residual"], checks)]
    if rounding:
        tables.append(Table(["float32 against its own float64", "stage", "jax", "torch"], rounding))
    return Section(_TITLES["parity"], notes, tables)


def _precision(record: Record, records: goals.Records) -> Section:
    rows = [
        [of["workload"], mode, *(_number(of[mode][side], ".2g") for side in ("jax", "torch"))]
        for of in record["rows"].get("gradients", {}).get("errors", [])
        for mode in MODES
    ]
    text = "Norm of the difference of the gradients from the same framework's in float64, over their norm."
    return Section(_TITLES["precision"], [text], [Table(["model", "", "jax", "torch"], rows)])


def _tests(record: Record, records: goals.Records) -> Section:
    rows = [
        [name, *(_number(row.get(key)) for key in ("passed", "skipped")), ", ".join(row.get("failed", [])) or "none"]
        for name, row in record["rows"].items()
    ]
    return Section(_TITLES["tests"], [], [Table(["tests", "passed", "skipped", "failed"], rows)])


def _benchmark(record: Record, records: goals.Records) -> Section:
    rows = [row for row in record["rows"].values() if "races" in row]
    if not rows:
        return Section(_TITLES["benchmark"], [MISSING])
    merged: dict[str, Any] = {}
    for row in rows:
        merged = {**row, **merged}
    merged["races"] = [race for row in rows for race in row["races"]]
    merged["seconds"] = sum(row["seconds"] for row in rows)
    merged["targets"] = targets.rows(merged)
    return Section(_TITLES["benchmark"], [], [], report.text(merged))


def _utilisation(record: Record, records: goals.Records) -> Section:
    descriptions = jobs(bool(record.get("smoke")))
    speeds = goals.speeds(records)
    rows = []
    for row in utilisation.table(record, records.get("machine", {})):
        torch = speeds.get((row["job"], "torch"))
        loaded = row.get("seconds_per_step_with_loader")
        cells = [
            *(str(row["batch_per_gpu"]), f"{1e3 * row['seconds_per_step']:.4g}"),
            MISSING if loaded is None else f"{1e3 * loaded:.4g}",
            f"{row['speed']:.4g}",
            _number(row["speed"] / torch if torch else None, ".2f"),
            _number(row["utilisation"], ".1%"),
            _number(row["peak_bytes"] / 1e9 if row.get("peak_bytes") else None, ".1f"),
        ]
        rows.append([f"{descriptions[row['job']].description}: {utilisation.CONTENDERS[row['contender']]}", *cells])
    head = ["", "batch per GPU", "ms per step", "with loader", "examples/s per GPU", "x torch DDP", "utilisation"]
    failed = [f"{name}: {row[FAILURE]}" for name, row in record["rows"].items() if FAILURE in row]
    text = (
        "Utilisation: operations of the model's products and convolutions, counted by jaxddp.plan, over the bf16 rate."
    )
    return Section(_TITLES["utilisation"], [text, *failed], [Table([*head, "peak GB"], rows)])


def _profile(record: Record, records: goals.Records) -> Section:
    text, tables = [], []
    for name, row in record["rows"].items():
        if "kernels" not in row:
            continue
        busy = ", ".join(f"{share:.1%} on {device}" for device, share in row["busy_share"].items())
        sent = f"; messages take {row['communication_share']:.1%}" if row["communication_share"] else ""
        window = f"{row['steps']} steps of {row['batch_per_gpu']} examples in {row['window_ms']:g} ms"
        text.append(f"{name}: {window}; kernels run {busy} of the time{sent}")
        longest = [
            [_cut(one["name"]), str(one["calls"]), f"{one['ms']:g}", f"{one['share']:.1%}"] for one in row["kernels"]
        ]
        tables.append(Table([f"{name}: kernel", "calls", "ms", "share"], longest))
        gaps = [[f"{gap['ms']:g}", f"{gap['at_ms']:g}", _cut(gap["before"]), _cut(gap["after"])] for gap in row["gaps"]]
        tables.append(Table([f"{name}: gap, ms", "at ms", "kernel before", "kernel after"], gaps))
    return Section(_TITLES["profile"], text, tables)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


_TITLES: Mapping[str, str] = {
    "machine": "Machine",
    "parity": "Parity: jax and torch on the GPU",
    "precision": "Precision: errors of gradients",
    "tests": "Tests",
    "benchmark": "Benchmark: ms per step, and times as long that others take",
    "utilisation": "Utilisation in bf16",
    "profile": "Profile of jaxddp's steps",
}
_MAKERS: Mapping[str, Callable[[Record, goals.Records], Section]] = {
    "machine": _machine,
    "utilisation": _utilisation,
    "profile": _profile,
    "benchmark": _benchmark,
    "parity": _parity,
    "precision": _precision,
    "tests": _tests,
}


def headline(lines: Sequence[Record]) -> list[str]:
    """Return a line for each target, for the console.

    >>> headline([{"id": "G1", "text": "x", "limit": 1.3, "value": None, "of": None, "met": None}])
    ['G1  at least 1.3 x: not measured']
    """
    return [f"{row['id']}  at least {row['limit']:g} {row['text']}: {_of_worst(row)}" for row in lines]
