"""README.md of a folder of results: the targets, what failed, and a table of each part."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, targets
from benchmarks.gpu import goals
from benchmarks.gpu.jobs import CONTENDERS, row_name
from benchmarks.gpu.measurements import PARTS
from benchmarks.gpu.runner import FAILURE, GpuRecord, Row, Rows
from benchmarks.tables import table
from jaxddp.files import write_atomically

NAME = "README.md"
MISSING = "not measured"
SMOKE = "A smoke run on CPU devices with tiny sizes: these numbers mean nothing."
NOTES = {
    "machine": "Copies count what is read and written, all-reduces by their bus bandwidth.",
    "parity": "Largest residuals of each stage in float64, and the rounding in float32 of both sides.",
    "precision": "Norm of the difference of the gradients from the same framework's in float64, over their norm.",
    "utilisation": "Utilisation: operations of the model's products and convolutions, as jaxddp.plan counts them, "
    "over the rate of a bf16 product.",
}
LONGEST = 70  # letters of a text; the mangled names of kernels can have hundreds


def write(folder: Path, record: GpuRecord) -> None:
    """Write the page of a record; parts that were not measured say so."""
    machine = record.rows.get("machine", {})
    device, date = machine.get("jax", {}), machine.get("hardware", {}).get("date")
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


def tables(rows: Mapping[str, Row], title: str = "") -> Iterator[str]:
    """Yield a table with a line for each row and a column for each number, and then one for each table in a row.

    A list is a table, and so is a dictionary of dictionaries.

    >>> rows = {"jax": {"rates": {"bf16": 0.12345}, "gaps": [{"ms": 2}]}, "torch": {"rates": {"bf16": 3}}}
    >>> for text in tables(rows):
    ...     print(text)
    |  | rates bf16 |
    |---|---|
    | jax | 0.1235 |
    | torch | 3 |
    | jax, gaps | ms |
    |---|---|
    | 1 | 2 |
    """
    flat = {name: dict(_flat(row)) for name, row in rows.items()}
    columns = dict.fromkeys(key for row in flat.values() for key, value in row.items() if not _is_table(value))
    if columns:
        cells = ([name, *(_cell(row.get(key, "")) for key in columns)] for name, row in flat.items())
        yield table([title, *columns], cells)
    for name, row in flat.items():
        for key, value in row.items():
            if _is_table(value):
                items = value.items() if isinstance(value, dict) else enumerate(value, 1)
                lines = {str(item): one if isinstance(one, dict) else {key: one} for item, one in items}
                yield from tables(lines, f"{name}, {key}")


def _is_table(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(one, dict) for one in value.values())
    return isinstance(value, list)


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts and tables of a row, and of the dictionaries in it."""
    for key, value in row.items():
        if isinstance(value, dict) and not _is_table(value):
            yield from ((f"{key} {name}", one) for name, one in _flat(value))
        else:
            yield key, value


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else MISSING if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
