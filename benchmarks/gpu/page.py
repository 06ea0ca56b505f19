"""README.md of a folder of results: the targets, what failed, and a table of each part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report, targets
from benchmarks.gpu import goals
from benchmarks.gpu.jobs import CONTENDERS, row_name
from benchmarks.gpu.measurements import PARTS
from benchmarks.gpu.runner import FAILURE, GpuRecord, Row, Rows
from benchmarks.tables import MISSING, tables
from jaxddp.files import write_atomically

NAME, MARK = "README.md", "# jaxddp ·".encode()
SMOKE = "A smoke run on CPU devices with tiny sizes: these numbers mean nothing."
NOTES = {
    "machine": "Copies count what is read and written, all-reduces their bus bandwidth.",
    "parity": "Largest residuals of each stage in float64, and the rounding in float32 of both sides.",
    "precision": "Norm of the difference of the gradients from the same framework's in float64, over their norm.",
    "utilisation": "Utilisation: operations of the model's products and convolutions, as jaxddp.plan counts them, "
    "over the rate of a bf16 product.",
}


def write(folder: Path, record: GpuRecord) -> None:
    """Write the page of a record; parts that were not measured say so."""
    machine = record.rows.get("machine", {})
    device, date = machine.get("rates", {}), machine.get("hardware", {}).get("date")
    named = f"{device['count']} x {device['device']}" if "device" in device else "device not measured"
    blocks = [f"# {' · '.join(filter(None, ['jaxddp', named, date]))}", *([SMOKE] if record.smoke else [])]
    blocks += ["\n".join(f"- {line}" for line in goals.lines(record.rows))]
    if failures := record.failures(PARTS):
        blocks += ["Failed:", "\n".join(f"- {line}" for line in failures)]
    for part in PARTS:
        rows = {name: row for name, row in record.rows.get(part, {}).items() if FAILURE not in row or len(row) > 2}
        blocks += [f"## {part.capitalize()}", *filter(None, [NOTES.get(part)])]
        blocks += _of_part(part, rows, record.rows) if rows else [MISSING]
    write_atomically(folder / NAME, ("\n\n".join(blocks) + "\n").encode())


def _of_part(part: str, rows: dict[str, Row], every: Rows) -> Iterator[str]:
    if part == "benchmark":
        yield f"```\n{report.text(_merged(list(rows.values())))}\n```"
    elif part == "utilisation":
        yield from tables({_label(row): row for row in goals.speeds(every)})
    else:
        yield from tables(rows)


def _label(row: Row) -> str:
    return row_name(row["job"], CONTENDERS[row["contender"]].label)


def _merged(records: list[Row]) -> dict[str, Any]:
    """Return the records of `python -m benchmarks` as if one run had measured all workloads."""
    merged: dict[str, Any] = {}
    for record in records:
        merged = {**record, **merged}
    merged["races"] = [race for record in records for race in record["races"]]
    merged["seconds"] = sum(record["seconds"] for record in records)
    return {**merged, "targets": targets.rows(merged)}
