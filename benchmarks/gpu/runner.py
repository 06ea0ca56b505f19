"""Run measurements one after another, each in a child process with a time limit, and keep what they return.

A measurement that crashes or takes too long is recorded with its last line, and the others continue.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ChildFailed, call
from benchmarks.gpu.measurements import Measurement
from jaxddp.files import write_atomically

Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]  # by part and name
NAME, MARK = "record.json", rb'\{\s*"smoke"'
FAILURE = "failure"  # key of a row: why it counts as not measured, and is measured again by the next run


class GpuRecord:
    """Rows of a folder's measurements, written after each one.

    Args:
        folder: folder of the results.
        smoke: whether sizes are tiny; rows of another kind of run are not kept.
    """

    def __init__(self, folder: Path, smoke: bool):
        self._path, self.smoke = folder / NAME, smoke
        self.rows: Rows = {}
        if self._path.exists():
            earlier = json.loads(self._path.read_text())
            self.rows = earlier["rows"] if earlier["smoke"] == smoke else {}

    def add(self, one: Measurement, row: Row) -> None:
        """Add a row to the file."""
        self.rows.setdefault(one.part, {})[one.name] = row
        write_atomically(self._path, f"{json.dumps({'smoke': self.smoke, 'rows': self.rows}, indent=2)}\n".encode())

    def has(self, one: Measurement) -> bool:
        """Return whether a row is measured."""
        return FAILURE not in self.rows.get(one.part, {}).get(one.name, {FAILURE: "not measured"})

    def failures(self, parts: Iterable[str]) -> list[str]:
        """Return a line for each row of some parts that failed."""
        named = ((part, name, row) for part in parts for name, row in self.rows.get(part, {}).items())
        return [f"{part}, {name}: {row[FAILURE]}" for part, name, row in named if FAILURE in row]


def run(folder: Path, measurements: Sequence[Measurement], minutes: float, smoke: bool) -> GpuRecord:
    """Run the measurements of which the folder has no row yet; print a line for each as it ends.

    Args:
        folder: folder of the results.
        measurements: all measurements.
        minutes: time of all together.
        smoke: whether sizes are tiny.
    """
    record = GpuRecord(folder, smoke)
    due = [one for one in measurements if not record.has(one)]
    for one in measurements:
        if one not in due:
            print(_line(one, 0.0, "kept from an earlier run"), flush=True)
    deadline = time.monotonic() + 60 * minutes
    for number, one in enumerate(due):
        limit = share([each.seconds for each in due[number:]], deadline - time.monotonic())
        started = time.monotonic()
        try:
            log = folder / f"{one.part}-{one.name.replace(', ', '-').replace(' ', '-')}.log"
            row = call(f"benchmarks.{one.module}", one.function, one.arguments, log, limit, one.env)
        except ChildFailed as failure:
            row = {FAILURE: str(failure)}
        seconds = time.monotonic() - started
        record.add(one, {**row, "took_seconds": round(seconds, 1)})
        print(_line(one, seconds, row.get(FAILURE, "complete")), flush=True)
    return record


def share(wanted: Sequence[float], left: float) -> float:
    """Return the time limit of the next measurement, in seconds: twice its share of the time left.

    Most measurements take less than their share.

    Args:
        wanted: expected seconds of the measurements that are left, the next one first.
        left: seconds left for all of them.

    >>> share([90, 210], 300), share([90], 60), share([90], -1)
    (180.0, 60, 0.0)
    """
    return max(0.0, min(left, 2 * left * wanted[0] / sum(wanted)))


def _line(one: Measurement, seconds: float, text: str) -> str:
    return f"{f'{one.part}, {one.name}':40}{seconds:6.0f} s  {text}"
