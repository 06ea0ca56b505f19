"""Verdicts on correct ports whose halves are written differently; the ports are in tests/faults/right."""

import importlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.unseen import words_of
from benchmarks.tables import table
from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

WORLD_SIZE = 2
ALARMS = ("different", "beyond", "incomplete")
BESIDE = ("alone", "several", "elsewhere")


@dataclass(frozen=True)
class RightScore:
    """Verdict on a correct port.

    Attributes:
        name: name of the port: number and family/styles.
        verdict: verdict of the report; of a port with a fault: "alone", one difference, all of whose segments are
            at the fault's line, whatever its name; "several", others, too; "elsewhere", not that line.
        said: what the report says first of a port that is not equal.
        seconds: duration of the check.
        parts: duration of each of its parts; see `Findings.part_seconds`.
    """

    name: str
    verdict: str
    said: str
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)


def right_module() -> Any:
    """Return `tests.faults.right`, which only a checkout of the repository has."""
    return importlib.import_module("tests.faults.right")


def score_right(port: Any, workers: Workers) -> RightScore:
    """Check a correct port.

    Args:
        port: a `tests.faults.right.RightPort`.
        workers: processes to run the check in.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxddp-right-") as folder:
        path = port.write(Path(folder))
        report = check(path, world_size=WORLD_SIZE, numerics=False, workers=workers, tell=lambda line: None)
    seconds = time.monotonic() - started
    return RightScore(port.name, report.verdict, _first_words(report), seconds, report.part_seconds)


def score_beside(port: Any, workers: Workers) -> RightScore:
    """Check a correct port with a fault; see `tests.faults.right.beside`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxddp-beside-") as folder:
        path = port.write(Path(folder))
        report = check(path, world_size=WORLD_SIZE, steps=3, numerics=False, workers=workers, tell=lambda line: None)
    seconds = time.monotonic() - started
    causes = "; ".join(words_of(one) for one in report.differences if one.cause)
    return RightScore(port.name, beside(port, report), causes, seconds, report.part_seconds)


def beside(port: Any, report: Report) -> str:
    """Return whether a fault is the only one that the check finds in a correct port."""
    lines = [one.jax_line.line for difference in report.differences for one in difference.segments if one.jax_line]
    planted = right_module().planted_lines(port)
    if planted.isdisjoint(lines):
        return "elsewhere"
    return "alone" if len(report.differences) == 1 and {*lines} <= planted else "several"


def _first_words(report: Report) -> str:
    places = [f"{x.stage}, step {x.step}, {x.tensor}" for x in report.differences]
    places += [f"{x.trial.what}: {x.stage}, {x.tensor}" for x in report.beyond]
    return next(iter([*places, *map(str, report.problems)]), "")


def counts(scores: Sequence[RightScore]) -> str:
    """Return the numbers of false alarms and the seconds of a check, in words.

    >>> counts([RightScore("00_mlp/nnx", "equal", "", 4.0), RightScore("01_mlp/tree", "beyond", "rates", 6.0)])
    '0 different, 1 beyond, 0 incomplete, 5.0 s each'
    """
    numbers = Counter(score.verdict for score in scores)
    seconds = sum(score.seconds for score in scores) / len(scores)
    return ", ".join([*(f"{numbers[verdict]} {verdict}" for verdict in ALARMS), f"{seconds:.1f} s each"])


def counts_beside(scores: Sequence[RightScore]) -> str:
    """Return how many faults in correct ports are found alone, in words.

    >>> counts_beside([RightScore("00_mlp/nnx", "alone", "", 4.0), RightScore("01_mlp/tree", "several", "", 6.0)])
    '1 found alone, at its line, 1 beside others, 0 elsewhere'
    """
    alone, several, elsewhere = (sum(score.verdict == verdict for score in scores) for verdict in BESIDE)
    return f"{alone} found alone, at its line, {several} beside others, {elsewhere} elsewhere"


def section(scores: Sequence[RightScore]) -> Iterator[str]:
    """Yield the blocks of the scoreboard's document."""
    yield "## Correct ports whose halves are written differently"
    yield f"{len(scores)} ports, in the run and beyond it: {counts(scores)}."
    if false := [f"- {score.name}: {score.verdict}: {score.said}" for score in scores if score.verdict != "equal"]:
        yield "\n".join(false)
    parts = dict.fromkeys(part for score in scores for part in score.parts)
    seconds = [(part, statistics.median(score.parts.get(part, 0.0) for score in scores)) for part in parts]
    yield table(["part of a check", "seconds, median"], [(part, f"{x:.2f}") for part, x in seconds])


def section_beside(scores: Sequence[RightScore]) -> Iterator[str]:
    """Yield the blocks on correct ports with a fault."""
    yield "## Correct ports with a fault"
    yield f"{len(scores)} ports whose loss is given another batch: {counts_beside(scores)}."
    if others := [f"- {score.name}: {score.verdict}: {score.said}" for score in scores if score.verdict != "alone"]:
        yield "\n".join(others)
