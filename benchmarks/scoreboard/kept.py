"""Results in a file, a line each as they are known: what is there is not run again.

The scoreboard takes hours, and nothing of it is lost if it is stopped.
"""

import dataclasses
import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.mutants import Outcome
from benchmarks.scoreboard.score import Question, Score
from jaxddp.errors import InputError


class Kept:
    """Results by their keys, on disk if there is a path.

    Args:
        path: of JSON lines; made if it is missing. None: nothing is kept.

    Raises:
        InputError: the file holds something else.

    >>> kept = Kept(None)
    >>> kept.add(("mutants", "sum"), Outcome("sum", True, "test_mean", 1.0))
    >>> kept.outcome(("mutants", "sum")).by
    'test_mean'
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._lines: dict[tuple[str, ...], dict[str, Any]] = {}
        self._today = {"date": date.today().isoformat(), "commit": _commit()}
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                entry = json.loads(line)
                self._lines[tuple(entry["key"])] = entry
            except (ValueError, TypeError, KeyError):
                raise InputError(f"{path}: line {number} is no result of the scoreboard") from None

    def add(self, key: tuple[str, ...], result: Score | Outcome) -> None:
        """Keep a result."""
        fields = {field.name for field in dataclasses.fields(result)} - {"question"}
        entry = {"key": key, **self._today, **{name: getattr(result, name) for name in sorted(fields)}}
        self._lines[key] = json.loads(json.dumps(entry))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def score(self, key: tuple[str, ...], question: Question) -> Score | None:
        """The kept score of a question; None if it was not asked yet."""
        entry = self._lines.get(key)
        if entry is None:
            return None
        said = tuple(tuple(names) for names in entry["said"])
        where = tuple((stage, step, tensor, layer) for stage, step, tensor, layer in entry["where"])
        steps, seconds, others = entry["steps"], entry["seconds"], entry["others"]
        return Score(question, entry["verdict"], said, where, steps, seconds, others, tuple(entry["problems"]))

    def outcome(self, key: tuple[str, ...]) -> Outcome | None:
        """What became of a mutant; None if it was not tried yet."""
        entry = self._lines.get(key)
        return None if entry is None else Outcome(entry["name"], entry["killed"], entry["by"], entry["seconds"])

    def when(self) -> str:
        """Days and commits of all results: "2026-01-31, commit 1a2b3c4"."""
        days = sorted({entry["date"] for entry in self._lines.values()})
        commits = list(dict.fromkeys(entry["commit"] for entry in self._lines.values() if entry["commit"]))
        of_commits = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}" if commits else ""
        return ", ".join(filter(None, [" to ".join(dict.fromkeys([days[0], days[-1]])) if days else "", of_commits]))


def _commit() -> str:
    """Of the working tree; "+" if it has changes. Empty outside of git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
