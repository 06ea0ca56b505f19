"""Report of a soak as a table in Markdown, a column per job."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.tables import table

Record = Mapping[str, Any]
LEVELS = {  # what must stay level: unit and divisor
    "mebibytes": ("memory, MiB", 1),
    "files": ("open files", 1),
    "threads": ("threads", 1),
    "checkpoint_files": ("files of checkpoints", 1),
    "checkpoint_bytes": ("bytes of checkpoints, kB", 1000),
}


def to_markdown(of_jobs: Mapping[str, Record]) -> str:
    """Return the table."""
    rows: dict[str, Callable[[Record], str]] = {
        "kills": _kills,
        "starts, exit codes": _starts,
        "steps": lambda job: f"{job['steps']:,}",
        "steps lost by a kill": lambda job: _spread(lost(job)),
        "of these, by SIGTERM": lambda job: _spread(lost(job, "SIGTERM")),
        "seconds until further than before": lambda job: _spread(
            [one["recovery"] for one in job["kills"] if one["recovery"] is not None]
        ),
        "kills from which it did not recover": lambda job: str(sum(one["recovery"] is None for one in job["kills"])),
        "damaged checkpoints": lambda job: str(job["damaged"]),
        "each step is logged once": lambda job: "yes" if job["written_once"] else "no",
        **{f"{name}: first quarter, last quarter, most": _level_of(key, by) for key, (name, by) in LEVELS.items()},
        "log, kB at the end": lambda job: f"{job['samples'][-1]['log_bytes'] / 1000:,.0f}",
    }
    return table(["", *of_jobs], ([name, *map(row, of_jobs.values())] for name, row in rows.items()))


def lost(job: Record, of_signal: str | None = None) -> list[float]:
    """Return the steps that each kill cost, to within the log's interval.

    >>> kills = [{"signal": "SIGKILL", "reached": 90, "resumed": 60}]
    >>> kills.append({"signal": "SIGTERM", "reached": 80, "resumed": 85})
    >>> lost({"kills": kills}), lost({"kills": kills}, "SIGTERM")
    ([30, 0], [0])
    """
    kills = [one for one in job["kills"] if one["resumed"] is not None and of_signal in (None, one["signal"])]
    return [max(0, one["reached"] - one["resumed"]) for one in kills]


def level(samples: Sequence[Mapping[str, float]], key: str) -> tuple[float, float, float]:
    """Return the medians of the first and of the last quarter of the samples, and the maximum.

    >>> level([{"files": 3}, {"files": 3}, {"files": 9}, {"files": 4}], "files")
    (3, 4, 9)
    """
    values = [one[key] for one in samples]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:]), max(values)


def _level_of(key: str, by: int) -> Callable[[Record], str]:
    return lambda job: ", ".join(f"{value / by:,.0f}" for value in level(job["samples"], key))


def _kills(job: Record) -> str:
    counts = Counter(one["signal"] for one in job["kills"])
    return f"{len(job['kills'])} ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"


def _starts(job: Record) -> str:
    codes = ", ".join(f"{count} x {code}" for code, count in sorted(job["exit_codes"].items()))
    return f"{job['starts']}, {codes or 'none ended'}"


def _spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):,.0f}, at most {max(values):,.0f}" if values else "-"
