"""Score of the check's causes on edited ports: mutants that differ, of which the edited line is known."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.exam import LIMIT, exam_module
from benchmarks.scoreboard.score import EXPRESSION
from benchmarks.scoreboard.unseen import SMALL, lines_of, words_of
from benchmarks.tables import table
from jaxddp.errors import InputError
from jaxddp.parity.checking import check
from jaxddp.parity.progress import CAUSES
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers


@dataclass(frozen=True)
class EditedScore:
    """Result of the check on a mutant, with causes and patches.

    Attributes:
        name: name of the mutant.
        edit: the code before and after the edit, in a line.
        verdict: verdict of the report; "refused": the port was refused as a whole.
        in_loss: the first difference is one of the loss or of local gradients.
        named: each difference has a cause with a name.
        line: the report shows the edited line.
        largest: most calls of torch in a segment; -1: the report has no segment.
        patched: with the patches, the port is equal again.
        seconds: duration of the check, and of its search for causes.
        said: the causes, or the operations of segments without one.
    """

    name: str
    edit: str
    verdict: str
    in_loss: bool
    named: bool
    line: bool
    largest: int
    patched: bool
    seconds: tuple[float, float]
    said: tuple[str, ...]

    @property
    def small(self) -> bool:
        """Return whether every segment has few calls; a difference of a loss without a name has a segment."""
        return self.largest <= SMALL and (self.largest >= 0 or self.named or not self.in_loss)


def score_edited(mutant: Any, workers: Workers) -> EditedScore:
    """Check the port with the edit, with causes and patches, and score the report."""
    exam, started = exam_module(), time.monotonic()
    settings = {"world_size": exam.WORLD_SIZE, "steps": exam.STEPS, "time_limit": LIMIT, "tell": lambda line: None}
    with tempfile.TemporaryDirectory(prefix="jaxddp-edited-") as folder:
        port = mutant.source.write(Path(folder), mutant.half, mutant.text)
        try:
            report = check(port, **settings, numerics=False, patch=True, workers=workers)
        except InputError as error:
            refused = False, False, False, -1, False, (time.monotonic() - started, 0.0), (str(error),)
            return EditedScore(mutant.name, _edit(mutant), "refused", *refused)
    return scored(mutant, report, time.monotonic() - started)


def _edit(mutant: Any) -> str:
    return str(mutant).partition(": ")[2]


def scored(mutant: Any, report: Report, seconds: float) -> EditedScore:
    """Return the score of a report on a mutant."""
    differences = report.differences
    causes = [one.cause for one in differences if one.cause]
    segments = [one for difference in differences for one in difference.segments]
    operations = [" | ".join(filter(None, (", ".join(one.jax), ", ".join(one.torch)))) for one in segments]
    return EditedScore(
        mutant.name,
        _edit(mutant),
        report.verdict,
        bool(differences) and differences[0].stage in ("local_loss", "local_gradients"),
        bool(differences) and len(causes) == len(differences) and all(EXPRESSION not in one.names for one in causes),
        mutant.place[1] in lines_of(differences, mutant.half),
        max((len(one.torch) for one in segments), default=-1),
        any(one.patch is not None and one.patch.verdict == "equal" for one in differences),
        (seconds, report.part_seconds.get(CAUSES, 0.0)),
        tuple([words_of(one) for one in differences if one.cause] or operations or map(str, report.problems)),
    )


def differing(scores: Sequence[EditedScore]) -> list[EditedScore]:
    """Return the scores of the mutants that differ."""
    return [score for score in scores if score.verdict == "different"]


def counts(scores: Sequence[EditedScore]) -> str:
    """Return how many mutants differ, and of these, how many are located, named and patched, in words."""
    different = differing(scores)
    line, named, patched = (sum(getattr(score, name) for score in different) for name in ("line", "named", "patched"))
    small = sum(score.small for score in different)
    words = f"{len(different)} different, {line} with the edited line, {small} in at most {SMALL} calls of torch"
    return f"{words}, {named} named, {patched} equal with the patch"


def section(scores: Sequence[EditedScore]) -> Iterator[str]:
    """Yield the blocks of the scoreboard's document."""
    different = differing(scores)
    yield "## Causes of edits"
    whole, causes = (
        (statistics.median(score.seconds[k] for score in different) for k in (0, 1)) if different else (0, 0)
    )
    yield (
        f"{len(scores)} mutants that are not of the exam: {counts(scores)}. A check with causes and patches takes "
        f"{whole:.1f} s, and its search for causes {causes:.1f} s, at the median."
    )
    yield table(["mutant", "edit", "named", "line", "calls", "patch", "seconds", "says"], map(_row, different))


def _row(score: EditedScore) -> list[str]:
    marks = ["yes" if mark else "no" for mark in (score.named, score.line)]
    calls, patch = "-" if score.largest < 0 else str(score.largest), "equal" if score.patched else "-"
    says = "; ".join(score.said)
    return [score.name, f"`{score.edit}`", *marks, calls, patch, f"{score.seconds[1]:.1f}", says]
