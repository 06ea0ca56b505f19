"""Results of the scoreboard in a file of JSON lines, so that a stopped run continues where it was.

The scoreboard takes hours; each result is written as soon as it is known, and is not computed again.
"""

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.edited import EditedScore
from benchmarks.scoreboard.exam import ExamScore
from benchmarks.scoreboard.mutants import Outcome
from benchmarks.scoreboard.outside import OutsideScore, Place
from benchmarks.scoreboard.right import RightScore
from benchmarks.scoreboard.score import Question, Score
from benchmarks.scoreboard.unseen import UnseenScore
from jaxddp.errors import InputError

EXAM_FIELDS = dataclasses.fields(ExamScore)
RIGHT_FIELDS = dataclasses.fields(RightScore)
Result = Score | OutsideScore | UnseenScore | EditedScore | ExamScore | RightScore | Outcome


class Kept:
    """Results by key, in a file if there is a path.

    Args:
        path: file of JSON lines; created if it is missing. None keeps the results in memory only.

    Raises:
        InputError: a line of the file is not a result.

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
                raise InputError(f"{path}: line {number} is not a result of the scoreboard") from None

    def add(self, key: tuple[str, ...], result: Result) -> None:
        """Add a result, and append it to the file."""
        fields = {field.name for field in dataclasses.fields(result)} - {"question", "fault"}
        values = {name: getattr(result, name) for name in sorted(fields)}
        if isinstance(result, OutsideScore):
            values["places"] = [dataclasses.astuple(place) for place in result.places]
        entry = {"key": key, **self._today, **values}
        self._lines[key] = json.loads(json.dumps(entry))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def score(self, key: tuple[str, ...], question: Question) -> Score | None:
        """Return the score of a question; None if there is none yet."""
        entry = self._lines.get(key)
        if entry is None:
            return None
        said = tuple(tuple(names) for names in entry["said"])
        where = tuple((stage, step, tensor, layer) for stage, step, tensor, layer in entry["where"])
        steps, seconds, others = entry["steps"], entry["seconds"], entry["others"]
        problems, words = tuple(entry["problems"]), tuple(entry.get("words", ()))
        says = tuple((place, sentence) for place, sentence in entry.get("says", ()))
        return Score(question, entry["verdict"], said, where, steps, seconds, others, problems, words, says)

    def outside(self, key: tuple[str, ...], fault: Any) -> OutsideScore | None:
        """Return the score of a fault outside of the catalogue; None if there is none yet."""
        entry = self._lines.get(key)
        if entry is None:
            return None
        places = tuple(Place(*place) for place in entry["places"])
        said, problems = tuple(entry["said"]), tuple(entry["problems"])
        label, verdict, text, seconds = (entry[name] for name in ("label", "verdict", "text", "seconds"))
        patches = tuple(entry.get("patches", ()))
        return OutsideScore(label, fault, verdict, said, places, text, seconds, problems, patches)

    def outcome(self, key: tuple[str, ...]) -> Outcome | None:
        """Return the outcome of a mutant; None if there is none yet."""
        entry = self._lines.get(key)
        return None if entry is None else Outcome(entry["name"], entry["killed"], entry["by"], entry["seconds"])

    def exam(self, key: tuple[str, ...]) -> ExamScore | None:
        """Return what became of a mutant of the exam; None if it was not run yet."""
        entry = self._lines.get(key)
        return None if entry is None else ExamScore(**{field.name: entry[field.name] for field in EXAM_FIELDS})

    def right(self, key: tuple[str, ...]) -> RightScore | None:
        """Return the verdict on a correct port; None if it was not run yet."""
        entry = self._lines.get(key)
        return None if entry is None else RightScore(**{field.name: entry[field.name] for field in RIGHT_FIELDS})

    def unseen(self, key: tuple[str, ...]) -> UnseenScore | None:
        """Return the score of a port of tests/faults/unseen; None if there is none yet."""
        entry = self._lines.get(key)
        if entry is None:
            return None
        return UnseenScore(**_fields(entry, UnseenScore))

    def edited(self, key: tuple[str, ...]) -> EditedScore | None:
        """Return the score of a mutant with causes; None if there is none yet."""
        entry = self._lines.get(key)
        return None if entry is None else EditedScore(**_fields(entry, EditedScore))

    def when(self) -> str:
        """Return the dates and commits of all results: "2026-01-31, commit 1a2b3c4"."""
        days = sorted({entry["date"] for entry in self._lines.values()})
        commits = list(dict.fromkeys(entry["commit"] for entry in self._lines.values() if entry["commit"]))
        of_commits = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}" if commits else ""
        return ", ".join(filter(None, [" to ".join(dict.fromkeys([days[0], days[-1]])) if days else "", of_commits]))


def _fields(entry: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of a score as they were kept, with tuples in place of lists."""
    values = {field.name: entry[field.name] for field in dataclasses.fields(kind)}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


def _commit() -> str:
    """Return the commit of the working tree, with "+" if it has changes; "" outside a git repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
