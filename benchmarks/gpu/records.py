"""Records of the parts: one JSON file each, complete at any time, which tells what is still to be measured.

A record holds rows by name. A row that failed has a "failure", and is measured again by the next run; the others are
kept.
"""

import datetime
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.children import ChildFailed
from jaxddp.files import write_atomically

Row = dict[str, Any]
FAILURE, UNAVAILABLE = "failure", "unavailable"


def path_of(folder: Path, part: str) -> Path:
    """Return the file of a part's record."""
    return folder / f"{part}.json"


def log_of(folder: Path, part: str) -> Path:
    """Return the file of what a part printed."""
    return folder / f"{part}.log"


def read(folder: Path, part: str) -> dict[str, Any]:
    """Return a part's record; empty if there is none, or none that can be read."""
    try:
        record = json.loads(path_of(folder, part).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write(folder: Path, part: str, record: Mapping[str, Any]) -> None:
    """Write a part's record as a whole."""
    write_atomically(path_of(folder, part), f"{json.dumps(record, indent=2)}\n".encode())


def reopen(folder: Path, part: str, smoke: bool) -> None:
    """Leave the rows of a part's record that need not be measured again, and nothing of how the part ended."""
    earlier = read(folder, part)
    rows: dict[str, Row] = earlier.get("rows", {}) if earlier.get("smoke") == smoke else {}
    kept = {name: row for name, row in rows.items() if FAILURE not in row}
    write(folder, part, {"part": part, "complete": False, "smoke": smoke, "rows": kept})


def is_complete(record: Mapping[str, Any], smoke: bool) -> bool:
    """Return whether a part needs not run again: all its rows are measured, as a smoke run or not."""
    return bool(record.get("complete")) and record.get("smoke") == smoke


def failures(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return why rows failed, by name."""
    return {name: row[FAILURE] for name, row in rows.items() if FAILURE in row}


class Record:
    """A part's record while the part runs, written after each row.

    Args:
        folder: folder of the results.
        part: name of the part.
        smoke: whether sizes are tiny; rows of another kind of run are not kept.
    """

    def __init__(self, folder: Path, part: str, smoke: bool):
        self.folder, self.part, self.smoke = folder, part, smoke
        reopen(folder, part, smoke)
        self.rows: dict[str, Row] = read(folder, part)["rows"]
        self._started = time.perf_counter()

    def add(self, name: str, measure: Callable[[], Row]) -> Row:
        """Measure a row, unless an earlier run did; a child that fails makes a row with its "failure"."""
        if name not in self.rows:
            print(f"--- {self.part}: {name}", flush=True)
            started = time.perf_counter()
            try:
                row = measure()
            except ChildFailed as failure:
                row = {FAILURE: str(failure)}
            self.rows[name] = row | {"took_seconds": round(time.perf_counter() - started, 1)}
            self._write(complete=False)
        return self.rows[name]

    def close(self) -> dict[str, str]:
        """Mark the record as complete if no row failed; return the failures."""
        failed = failures(self.rows)
        self._write(complete=not failed, failed=failed)
        return failed

    def _write(self, complete: bool, failed: Mapping[str, str] | None = None) -> None:
        record: dict[str, Any] = {
            "part": self.part,
            "complete": complete,
            "smoke": self.smoke,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - self._started, 1),
            "rows": self.rows,
        }
        if failed:
            first = next(iter(failed.items()))
            record[FAILURE] = f"{len(failed)} of {len(self.rows)} rows failed: {first[0]}: {first[1]}"
        write(self.folder, self.part, record)
