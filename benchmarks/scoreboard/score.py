"""One planted port through the check: found, named, in how many steps, and what others would have said."""

import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.scoreboard.others import Traces, alarms
from jaxddp.parity.cases import PortCase
from jaxddp.parity.checking import report_on
from jaxddp.parity.diagnosis.explain import explain
from jaxddp.parity.findings import Difference
from jaxddp.parity.port import PortSource
from jaxddp.parity.records import Lazy, Record, Records
from jaxddp.parity.report.report import Report
from jaxddp.parity.runs import Runs
from jaxddp.parity.workers import Workers

NUMERIC = ("fast_variance", "decay_rounded_away", "reduced_precision_matmul")  # that float32 may be needed for


@dataclass(frozen=True)
class Question:
    """A port with faults, and what may be said of it.

    Attributes:
        source: the port.
        label: of the planted fault, or of the pair.
        scenario, optimizer: in which it stands.
        world_size, steps: to run.
        accepted: for each fault that is planted, the names that are right.
    """

    source: PortSource
    label: str
    scenario: str
    optimizer: str
    world_size: int
    steps: int
    accepted: tuple[frozenset[str], ...] = ()

    @property
    def family(self) -> str:
        """SGD, or Adam and its kin."""
        return "SGD" if self.optimizer.startswith("sgd") else "Adam"


@dataclass(frozen=True)
class Score:
    """What the check said.

    Attributes:
        question: of what.
        verdict: the report's.
        said: for each difference, the names that it was given; empty: unexplained.
        where: for each difference, stage, step, tensor and layer.
        steps: after how many steps that show it the names were the right ones; None: never.
        seconds: of the whole check.
        others: method -> whether it raises an alarm.
        problems: what kept the check from being made.
    """

    question: Question
    verdict: str
    said: tuple[tuple[str, ...], ...]
    where: tuple[tuple[str, int, str, str], ...]
    steps: int | None
    seconds: float
    others: dict[str, bool] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the port was called different."""
        return self.verdict == "different"

    @property
    def named(self) -> bool:
        """Whether every fault has its name, and nothing else has one."""
        return right(self.said, self.question.accepted)

    @property
    def wrong(self) -> bool:
        """Whether a name was given that is not of a planted fault."""
        known = frozenset().union(*self.question.accepted)
        return any(names and not known & set(names) for names in self.said)


def right(said: Sequence[Sequence[str]], accepted: Sequence[frozenset[str]]) -> bool:
    """Whether there is one difference for each fault, and it has one of the fault's names.

    >>> right([("sum_not_mean", "check_vma")], [frozenset({"check_vma"})])
    True
    >>> right([("eps_value",), ()], [frozenset({"eps_value"})])
    False
    """
    if len(said) != len(accepted) or not accepted:
        return False
    if len(said) == 1:
        return bool(set(said[0]) & accepted[0])
    # Faults and differences pair off, whichever comes first.
    return any(
        set(said[0]) & accepted[i] and right(said[1:], [*accepted[:i], *accepted[i + 1 :]])
        for i in range(len(accepted))
    )


def score(question: Question, workers: Workers, count_steps: bool = True, float32: bool = False) -> Score:
    """Check a port.

    Args:
        count_steps: try with fewer steps, to see how many are needed.
        float32: run in float32 too, also where that is not needed to name the fault.
    """
    started = time.monotonic()
    runs = Runs(PortCase(question.source, question.world_size, question.steps), workers)
    runs.in_float64()
    float32 = float32 or any(name in NUMERIC for names in question.accepted for name in names)
    if float32 and len(runs.jax):
        runs.in_float32()
    report = report_on(runs, workers, started)
    seconds = time.monotonic() - started
    said = _said(report.differences)
    steps = None
    if count_steps and right(said, question.accepted):
        steps = _steps_needed(runs, workers, question, report)
    others = alarms(_traces(runs)) if len(runs.jax) else {}
    problems = tuple(f"{problem.side}: {problem.where}: {problem.message}" for problem in report.problems)
    return Score(question, report.verdict, said, _where(report.differences), steps, seconds, others, problems)


def _said(differences: Sequence[Difference]) -> tuple[tuple[str, ...], ...]:
    return tuple(difference.cause.names if difference.cause else () for difference in differences)


def _where(differences: Sequence[Difference]) -> tuple[tuple[str, int, str, str], ...]:
    return tuple((d.stage, d.step, d.tensor, d.layer.torch if d.layer else "") for d in differences)


def _steps_needed(runs: Runs, workers: Workers, question: Question, report: Report) -> int:
    """The fewest steps, counted from the first that shows a difference, that suffice for the right names."""
    first = max(min(difference.step for difference in report.differences), 1)
    if runs.starts or any(difference.kind == "numeric" for difference in report.differences):
        return 1
    for steps in range(first, question.steps):
        if right(_said(explain(runs.evidence(steps), workers, [], layers=False)), question.accepted):
            return steps - first + 1
    return question.steps - first + 1


def _traces(runs: Runs) -> Traces:
    return Traces(runs.torch, *(Lazy(records.__len__, partial(_plain, records)) for records in (runs.free, runs.jax)))


def _plain(records: Records, index: int) -> Record:
    """A record in which what the loss alone says stands for what a port's own step does not show."""
    record = records[index]
    missing = [name for name in ("local_loss", "local_gradients") if name not in record and f"pure_{name}" in record]
    return ChainMap({name: record[f"pure_{name}"] for name in missing}, record)  # type: ignore[arg-type]
