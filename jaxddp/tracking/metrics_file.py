"""Metrics of a run in a file: one JSON line per logged step and per epoch, readable after a kill at any moment."""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from jaxddp.errors import InputError
from jaxddp.files import write_atomically
from jaxddp.tracking.curves import Record

METRICS_FILE = "metrics.jsonl"
KINDS = ("step", "epoch")
MOST = 2**63  # above every step; NumPy's integers are smaller


def read_metrics(path: Path) -> list[Record]:
    """Read the records of a metrics.jsonl, without lines that are no records, as a kill or a crash may leave them.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return [record for record in map(_from_line, lines) if record is not None]


def open_metrics(path: Path, resume_step: int | None) -> TextIO:
    """Open the file for appending, after dropping the records after `resume_step`."""
    history = read_metrics(path) if resume_step is not None and path.exists() else []
    kept = [record for record in history if record["step"] <= (resume_step or 0)]
    write_atomically(path, "".join(map(to_line, kept)).encode())
    return path.open("a", encoding="utf-8", buffering=1)  # line-buffered, so that a killed run loses no line


def to_line(record: Record) -> str:
    """Return a record as strict JSON, where NaN and infinity become null.

    >>> to_line({"kind": "step", "step": 1, "epoch": 1, "loss": math.nan})
    '{"kind": "step", "step": 1, "epoch": 1, "loss": null}\\n'
    """
    lost = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | lost) + "\n"


def _from_line(line: str) -> Record | None:
    """Parse a record; None if the line is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        return None
    step, epoch = record.get("step"), record.get("epoch")
    if not (type(step) is type(epoch) is int and 0 <= step < MOST and epoch > 0):
        return None
    return record if all(map(_is_number, (value for name, value in record.items() if name != "kind"))) else None


def _is_number(value: Any) -> bool:
    """Return whether a metric is null or a number that a float can hold."""
    if isinstance(value, int):
        return abs(value) < MOST
    return value is None or isinstance(value, float)
