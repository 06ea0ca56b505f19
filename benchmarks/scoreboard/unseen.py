"""Score of the check on tests/faults/unseen, an exam by an author who does not know how the check works."""

import importlib
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.score import EXPRESSION
from benchmarks.tables import table
from jaxddp.parity.checking import check
from jaxddp.parity.findings import Difference
from jaxddp.parity.progress import CAUSES
from jaxddp.parity.quote import Quote
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers

WORLD_SIZE, STEPS = 2, 4
SMALL = 4  # most of torch's calls in a segment that counts as located


@dataclass(frozen=True)
class UnseenScore:
    """Result of the check on a port with one fault, or two.

    Attributes:
        label: name of the fault, or of the pair.
        verdict: verdict of the report.
        named: every fault has a cause with its words, and no cause has other words.
        wrong: a cause has a name, and the words of none of the faults.
        jax_line, torch_line: the report has a right line of each fault.
        largest: most calls of torch in a segment; -1: the report has no segment.
        seconds: duration of the check, and of its search for causes.
        said: the causes, or the operations of segments without one.
    """

    label: str
    verdict: str
    named: bool
    wrong: bool
    jax_line: bool
    torch_line: bool
    largest: int
    seconds: tuple[float, float]
    said: tuple[str, ...]

    @property
    def located(self) -> bool:
        """Return whether both lines are right, and no segment is large."""
        return self.jax_line and self.torch_line and self.largest <= SMALL


def unseen_module() -> Any:
    """Return `tests.faults.unseen`, which only a checkout of the repository has."""
    return importlib.import_module("tests.faults.unseen")


def questions() -> dict[str, tuple[str, ...]]:
    """Return for each fault and each pair the names of its faults."""
    exam = unseen_module()
    return {**{name: (name,) for name in exam.UNSEEN}, **exam.PAIRS}


def score_unseen(label: str, names: Sequence[str], workers: Workers) -> UnseenScore:
    """Write a port with its faults to a temporary folder, check it, and score the report."""
    exam, faults = unseen_module(), [unseen_module().UNSEEN[name] for name in names]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxddp-unseen-") as folder:
        path = exam.fault.write(Path(folder), faults[0].port, *faults)
        report = check(
            path, world_size=WORLD_SIZE, steps=STEPS, numerics=False, workers=workers, tell=lambda line: None
        )
    return scored(label, faults, report, time.monotonic() - started)


def scored(label: str, faults: Sequence[Any], report: Report, seconds: float) -> UnseenScore:
    """Return the score of a report on a port with some faults."""
    exam = unseen_module().fault
    texts = exam.edited(faults[0].port, *faults), exam.source(faults[0].port, "torch")
    named = [one for one in report.differences if one.cause]
    causes = [words_of(one) for one in named]
    fitting = [[fault for fault in faults if _has_words(fault, words)] for words in causes]
    # What both sides compute is true, whatever the author calls it.
    wrong = [
        not fit and {*one.cause.names} != {EXPRESSION} for one, fit in zip(named, fitting, strict=True) if one.cause
    ]
    found = {id(fault) for some in fitting for fault in some}
    jax, torch = (lines_of(report.differences, side) for side in ("jax", "torch"))
    segments = [one for difference in report.differences for one in difference.segments]
    operations = [" | ".join(filter(None, (", ".join(one.jax), ", ".join(one.torch)))) for one in segments]
    return UnseenScore(
        label,
        report.verdict,
        len(found) == len(faults) and all(fitting),
        any(wrong),
        all(jax & _numbers(texts[0], fault.jax_lines) for fault in faults),
        all(torch & _numbers(texts[1], fault.torch_lines) for fault in faults),
        max((len(one.torch) for one in segments), default=-1),
        (seconds, report.part_seconds.get(CAUSES, 0.0)),
        tuple(causes or operations or map(str, report.problems)),
    )


def words_of(difference: Difference) -> str:
    """Return what the report says of a cause: its names, and what both sides compute."""
    assert difference.cause is not None, "the caller has seen it"
    code = (x for one in difference.segments for x in (one.jax_code, one.torch_code) if one.jax_code != one.torch_code)
    return " | ".join(filter(None, (" or ".join(sentences(difference.cause)), *code)))


def _has_words(fault: Any, words: str) -> bool:
    return all(re.search(expression, words, re.IGNORECASE) for expression in fault.expects)


def lines_of(differences: Sequence[Difference], side: str) -> set[int]:
    """Return the numbers of one side's lines that a report shows for its differences."""
    shown: list[Quote | None] = [getattr(one, side) for one in differences]
    shown += [getattr(one.cause, side) for one in differences if one.cause]
    shown += [getattr(segment, f"{side}_line") for one in differences for segment in one.segments]
    return {quote.line for quote in shown if quote is not None}


def _numbers(text: str, snippets: Sequence[str]) -> set[int]:
    return {number for number, line in enumerate(text.splitlines(), 1) for part in snippets if part in line}


def counts(scores: Sequence[UnseenScore]) -> str:
    """Return the numbers of faults found, named, named wrongly and located, in words."""
    found = sum(score.verdict == "different" for score in scores)
    named, wrong, located = (sum(getattr(score, name) for score in scores) for name in ("named", "wrong", "located"))
    lines = sum(score.jax_line and score.torch_line for score in scores)
    small = sum(score.largest <= SMALL for score in scores)
    words = f"{found} found, {named} named, {wrong} named wrongly, {lines} with the lines of both files"
    return f"{words}, {small} in at most {SMALL} calls of torch, {located} with both"


def section(scores: Sequence[UnseenScore]) -> Iterator[str]:
    """Yield the blocks of the scoreboard's document."""
    yield "## Faults by an author who does not know the check"
    whole, causes = (statistics.median(score.seconds[k] for score in scores) for k in (0, 1))
    yield (
        f"{len(scores)} ports of tests/faults/unseen with one fault or two: {counts(scores)}. "
        f"A check takes {whole:.1f} s, and its search for causes {causes:.1f} s, at the median."
    )
    yield table(["fault", "named", "lines", "calls", "seconds", "says"], map(_row, scores))


def _row(score: UnseenScore) -> list[str]:
    named = "yes" if score.named else "**wrong**" if score.wrong else "no"
    lines = " and ".join(side for side, has in (("jax", score.jax_line), ("torch", score.torch_line)) if has) or "-"
    calls = "-" if score.largest < 0 else str(score.largest)
    return [score.label, named, lines, calls, f"{score.seconds[1]:.1f}", "; ".join(score.said) or score.verdict]
