"""Metrics of a run in a file: one JSON line per logged step and per epoch, readable after a kill at any moment."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from jaxddp.errors import InputError
from jaxddp.files import check_regular, write_atomically
from jaxddp.tracking.curves import Record

METRICS_FILE = "metrics.jsonl"
KINDS = ("step", "test", "epoch")
MOST = 2**63  # above every step; NumPy's integers are smaller


def read_metrics(path: Path) -> list[Record]:
    """Read the records of a metrics.jsonl; skip lines that are not records, which a kill or a crash may leave.

    Raises:
        InputError: the file cannot be read, or is not a regular file.
    """
    check_regular(f"{path}", path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return [record for record in map(_from_line, lines) if record is not None]


def open_metrics(path: Path, resume_step: int | None) -> tuple[TextIO, list[Record]]:
    """Open the file for appending, after dropping the records after `resume_step`; return the others too."""
    history = read_metrics(path) if resume_step is not None and path.exists() else []
    kept = [record for record in history if record["step"] <= (resume_step or 0)]
    write_atomically(path, "".join(map(to_line, kept)).encode())
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    return os.fdopen(descriptor, "a", encoding="utf-8", buffering=1), kept  # line-buffered: a kill loses no line


def missing_records(kept: list[Record], count: int, step: int) -> str | None:
    """Describe how many records are missing in a history, and where; None if it is complete.

    Args:
        kept: records of a metrics.jsonl up to `step`.
        count: number of records up to `step` that the run has written.
        step: last step of the history.

    >>> missing_records([{"kind": "step", "step": 1, "epoch": 1}, {"kind": "step", "step": 2, "epoch": 1}], 5, step=5)
    '3 of 5 records until step 5 are missing, most of them between steps 2 and 5'
    """
    if len(kept) >= count:
        return None
    steps = sorted(record["step"] for record in kept)
    before, after = max(itertools.pairwise([0, *steps, step]), key=lambda gap: gap[1] - gap[0])
    place = f"most of them between steps {before} and {after}"
    return f"{count - len(kept)} of {count} records until step {step} are missing, {place}"


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
