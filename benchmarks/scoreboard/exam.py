"""Score of the check on the exam: correct ports, one half of which is edited mechanically, and the verdict alone.

The mutants and the proofs that some of them are equivalent are in tests/faults/exam, which shares no code with the
check.
"""

import importlib
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import table
from jaxddp.errors import InputError
from jaxddp.parity.checking import check
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

LIMIT = 120.0  # seconds of a check, after which it counts as refused; measured: 1 to 40, on two busy cores
# What becomes of a mutant. Refused: the check says that it could not compare. Remarked: it calls the port equal, and
# names the edited line, or says what it does not say of the correct port, as of initialisation or evaluation. The
# last two alone lack a word about the edit.
OUTCOMES = ("refused", "different", "beyond", "remarked", "equivalent", "silent")
OF_VERDICTS = {"incomplete": "refused", "different": "different", "beyond": "beyond"}


@dataclass(frozen=True)
class ExamScore:
    """Outcome of a mutant.

    Attributes:
        name: name of the mutant: port/half/operator/line:column/variant.
        edit: the code before and after the edit, in a line.
        outcome: one of `OUTCOMES`.
        said: what the check says first of it; for an equal port, the parts of which no proof shows that they are equal.
        seconds: duration of the check and of the proof.
    """

    name: str
    edit: str
    outcome: str
    said: str
    seconds: float

    @property
    def half(self) -> str:
        """Half that is edited, "jax" or "torch"."""
        return self.name.split("/")[1]

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return self.name.split("/")[2]


def exam_module() -> Any:
    """Return `tests.faults.exam`, which only a checkout of the repository has."""
    return importlib.import_module("tests.faults.exam")


def examine(mutant: Any, workers: Workers, limit: float = LIMIT) -> ExamScore:
    """Check the port with the edit, and return what becomes of it.

    Args:
        mutant: a `tests.faults.exam.Mutant`.
        workers: processes to run the check in.
        limit: seconds after which the check ends.
    """
    exam, started = exam_module(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxddp-exam-") as folder:
        port = mutant.source.write(Path(folder), mutant.half, mutant.text)
        report = _checked(port, exam, workers, limit)
        outcome, said = ("refused", report) if isinstance(report, str) else _outcome(report, mutant, workers)
        said = said.replace(f"{folder}/", "")
    return ExamScore(mutant.name, str(mutant).partition(": ")[2], outcome, said, time.monotonic() - started)


def _checked(port: Path, exam: Any, workers: Workers, limit: float) -> Report | str:
    """Return the report, or the error of a port that is refused as a whole."""
    settings = {"world_size": exam.WORLD_SIZE, "steps": exam.STEPS, "time_limit": limit, "tell": lambda line: None}
    try:
        return check(port, **settings, numerics=False, causes=False, workers=workers)
    except InputError as error:
        return str(error)


def _outcome(report: Report, mutant: Any, workers: Workers) -> tuple[str, str]:
    """Return the outcome of a mutant and what is said of it."""
    if report.verdict in OF_VERDICTS:
        return OF_VERDICTS[report.verdict], _first_words(report)
    if line := line_that_names(str(report), *mutant.place):
        return "remarked", line
    if new := sorted(_sentences(report) - _sentences_on_correct(mutant, workers)):
        return "remarked", new[0]
    by_hand = importlib.import_module("tests.faults.exam.equivalents").EQUIVALENTS
    if mutant.name in by_hand:
        return "equivalent", by_hand[mutant.name].why
    unproved = importlib.import_module("tests.faults.exam.equivalence").unproved_parts(mutant)
    return ("silent", "not proved: " + ", ".join(unproved)) if unproved else ("equivalent", "proved")


_on_correct: dict[str, set[str]] = {}  # name of a port -> the sentences on it as it is


def _sentences_on_correct(mutant: Any, workers: Workers) -> set[str]:
    name = mutant.name.partition("/")[0]
    if name not in _on_correct:
        with tempfile.TemporaryDirectory(prefix="jaxddp-exam-") as folder:
            report = _checked(mutant.source.write(Path(folder)), exam_module(), workers, LIMIT)
        _on_correct[name] = set() if isinstance(report, str) else _sentences(report)
    return _on_correct[name]


def _sentences(report: Report) -> set[str]:
    """Return what a report says of an equal port beside its numbers."""
    left_out = {f"not tried {trial.what}: {trial.left_out}" for trial in report.trials if trial.left_out}
    idle = {f"{one.operation} at {one.line.place} {one.why}" for one in report.without_effect}
    return {says for aspect in report.aspects.values() for says in aspect.says} | {*report.idle} | left_out | idle


def _first_words(report: Report) -> str:
    if report.differences:
        first = report.differences[0]
        return f"{first.stage}, step {first.step}, {first.tensor}"
    words = [*map(str, report.problems), report.ended, *report.idle]
    return next(filter(None, words), "").partition("\n")[0]


def line_that_names(text: str, file: str, number: int) -> str:
    """Return the first line of a text that names a line of a file; "": none does.

    >>> line_that_names("equal\\nwithout effect: clip at mlp_jax.py:12\\n", "mlp_jax.py", 12)
    'without effect: clip at mlp_jax.py:12'
    >>> line_that_names("clip at mlp_jax.py:120", "mlp_jax.py", 12)
    ''
    """
    place = re.compile(rf"{re.escape(file)}\W+(line )?{number}\b")
    return next((line.strip() for line in text.splitlines() if place.search(line)), "")


def counts(scores: Sequence[ExamScore]) -> str:
    """Return the numbers of all outcomes, in words.

    >>> counts([ExamScore("mlp/jax/number/1:2/0", "1 -> 2", "different", "", 1.0)])
    '0 refused, 1 different, 0 beyond, 0 remarked, 0 equivalent, 0 silent'
    """
    numbers = Counter(score.outcome for score in scores)
    return ", ".join(f"{numbers[outcome]} {outcome}" for outcome in OUTCOMES)


def section(scores: Sequence[ExamScore]) -> Iterator[str]:
    """Yield the blocks of the scoreboard's document."""
    yield "## Exam: mutants of correct ports"
    yield (
        "One half of a correct port is edited mechanically (`tests/faults/exam`), and three steps are checked. "
        "Remarked: the report of an equal port names the edited line, or has a sentence that the correct port's lacks. "
        "Equivalent: proved by equal programs after "
        f"simplification, or by hand. {sum(score.seconds for score in scores) / len(scores):.1f} s per mutant."
    )
    operators = list(dict.fromkeys(score.operator for score in sorted(scores, key=lambda score: score.operator)))
    rows = [*_rows("jax", scores), *_rows("torch", scores)]
    rows += [_row(operator, [score for score in scores if score.operator == operator]) for operator in operators]
    yield table(["half, operator", "mutants", *OUTCOMES], rows)
    silent = [score for score in scores if score.outcome == "silent"]
    if silent:
        yield "Silent:"
        yield "\n".join(f"- {score.name}: `{score.edit}`: {score.said}" for score in silent)
    else:
        yield "None is silent."


def _rows(half: str, scores: Iterable[ExamScore]) -> Iterator[Sequence[object]]:
    if of_half := [score for score in scores if score.half == half]:
        yield _row(f"{half} half", of_half)


def _row(label: str, scores: Sequence[ExamScore]) -> Sequence[object]:
    numbers = Counter(score.outcome for score in scores)
    return [label, len(scores), *(numbers[outcome] for outcome in OUTCOMES)]


def silent_list(path: Path, scores: Iterable[ExamScore]) -> str:
    """Return the text of the list of silent mutants, with the comments that the file has already."""
    lines = path.read_text().splitlines() if path.exists() else []
    comments = [line for line in lines if line.startswith("#")]
    names = sorted(score.name for score in scores if score.outcome == "silent")
    return "\n".join([*comments, *names]) + "\n"
