"""Score of the check on one port: fault found, fault named, steps needed, and the alarms of other thresholds."""

import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.scoreboard.others import Traces, alarms
from jaxddp.parity.cases import PortCase
from jaxddp.parity.checking import rates_and_start
from jaxddp.parity.diagnosis.differences import find_differences
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import STAGE_NAMES, Difference
from jaxddp.parity.port import PortSource
from jaxddp.parity.records import Lazy, Record, Records
from jaxddp.parity.report.numbers import number
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.report.words import layer_name
from jaxddp.parity.reporting import NO_RATES, report_on
from jaxddp.parity.runs import Runs
from jaxddp.parity.workers import Workers

EXPRESSION = "other_expression"  # a cause that is what both sides compute, and no name
NUMERIC = ("fast_variance", "decay_rounded_away", "reduced_precision_matmul")  # may need float32


@dataclass(frozen=True)
class Question:
    """A port with planted faults, and the names that are right for them.

    Attributes:
        source: the port.
        label: name of the planted fault, or of the pair.
        scenario, optimizer: names of the scenario and the optimizer of the port; "": the file has the optimizer.
        world_size, steps: settings of the run.
        accepted: for each planted fault, the names that are right.
    """

    source: PortSource
    label: str
    scenario: str
    optimizer: str
    world_size: int
    steps: int
    accepted: tuple[frozenset[str], ...] = ()

    @property
    def port(self) -> str:
        """Name of the scenario, and of the optimizer if there is one."""
        return f"{self.scenario} {self.optimizer}".rstrip()

    @property
    def family(self) -> str:
        """Return "SGD", or "Adam" for Adam and its relatives."""
        return "SGD" if self.optimizer.startswith("sgd") else "Adam"


@dataclass(frozen=True)
class Score:
    """Result of the check on one port.

    Attributes:
        question: the port that was checked.
        verdict: verdict of the report.
        said: for each difference, the names that the check gave it; empty if unexplained.
        where: for each difference, stage, step, tensor and layer.
        steps: number of steps, from the first that shows the fault, after which the names are right; None if never.
        seconds: duration of the check.
        others: method -> whether it raises an alarm.
        problems: problems of the report.
        words: for each difference, its cause in words, or its place if it is unexplained; see `in_words`.
        says: sentences about what a catalogue has no name for, each after its place; of public threads alone.
    """

    question: Question
    verdict: str
    said: tuple[tuple[str, ...], ...]
    where: tuple[tuple[str, int, str, str], ...]
    steps: int | None
    seconds: float
    others: dict[str, bool] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    says: tuple[tuple[str, str], ...] = ()

    @property
    def found(self) -> bool:
        """Return whether the verdict is "different"."""
        return self.verdict == "different"

    @property
    def named(self) -> bool:
        """Return whether every fault is named, and nothing else is."""
        return right(self.said, self.question.accepted)

    @property
    def wrong(self) -> bool:
        """Return whether a name was given that fits no planted fault; what both sides compute is no name."""
        known = frozenset().union(*self.question.accepted)
        return any({*names} - {EXPRESSION} and not known & set(names) for names in self.said)


def right(said: Sequence[Sequence[str]], accepted: Sequence[frozenset[str]]) -> bool:
    """Return whether there is one difference per fault, with one of the names of the fault.

    >>> right([("sum_not_mean", "check_vma")], [frozenset({"check_vma"})])
    True
    >>> right([("eps_value",), ()], [frozenset({"eps_value"})])
    False
    """
    if len(said) != len(accepted) or not accepted:
        return False
    if len(said) == 1:
        return bool(set(said[0]) & accepted[0])
    # Faults and differences are matched in any order.
    return any(
        set(said[0]) & accepted[i] and right(said[1:], [*accepted[:i], *accepted[i + 1 :]])
        for i in range(len(accepted))
    )


def score(question: Question, workers: Workers, count_steps: bool = True, correct: bool = False) -> Score:
    """Check a port, and score the result.

    Args:
        question: the port.
        workers: processes to run the check in.
        count_steps: whether to repeat the diagnosis with fewer steps, to find the number needed.
        correct: compare all that a check does, also where the accepted names do not need it.
    """
    started = time.monotonic()
    runs = Runs(PortCase(question.source, question.world_size, question.steps), workers)
    runs.in_float64()
    rates = rates_and_start(runs, workers) if correct else NO_RATES
    float32 = correct or any(name in NUMERIC for names in question.accepted for name in names)
    if float32 and len(runs.jax):
        runs.in_float32()
    report = report_on(runs, workers, started, rates=rates)
    seconds = time.monotonic() - started
    said = _said(report.differences)
    steps = None
    if count_steps and right(said, question.accepted):
        steps = _steps_needed(runs, workers, question, report)
    others = alarms(_traces(runs)) if len(runs.jax) else {}
    return replace(score_of(question, report, seconds), steps=steps, others=others)


def score_of(question: Question, report: Report, seconds: float) -> Score:
    """Return the score of a report, without the steps that the diagnosis needs and the other thresholds."""
    said, where = _said(report.differences), _where(report.differences)
    problems = tuple(f"{problem.side}: {problem.where}: {problem.message}" for problem in report.problems)
    words = tuple(map(in_words, report.differences))
    return Score(question, report.verdict, said, where, None, seconds, {}, problems, words)


def _said(differences: Sequence[Difference]) -> tuple[tuple[str, ...], ...]:
    return tuple(difference.cause.names if difference.cause else () for difference in differences)


def _where(differences: Sequence[Difference]) -> tuple[tuple[str, int, str, str], ...]:
    return tuple((d.stage, d.step, d.tensor, d.layer.torch if d.layer else "") for d in differences)


def in_words(difference: Difference) -> str:
    """Return the cause of a difference and the residual that it leaves, or where an unexplained one is.

    >>> from jaxddp.parity.deviation import Deviation, Statement
    >>> from jaxddp.parity.findings import Cause
    >>> in_words(Difference("update", 1, "fc.weight", 2e-3, 1e-12))
    'unexplained: update, step 1, fc.weight, residual 2e-3'
    >>> cause = Cause((Deviation("eps_value", Statement("norm_epsilon", norm="LayerNorm", value=1e-5)),), 6e-15)
    >>> in_words(Difference("update", 1, "fc.weight", 2e-3, 1e-12, cause=cause))
    'LayerNorm eps 1e-05 (residual 2e-3, with it 6e-15)'
    """
    cause, residual = difference.cause, f"residual {number(difference.residual)}"
    if cause is not None and cause.measured:
        return f"{' or '.join(sentences(cause))} ({cause.measured})"
    if cause is not None:
        return f"{' or '.join(sentences(cause))} ({residual}, with it {number(cause.residual)})"
    layer = difference.layer
    first = "" if layer is None else f"first layer {layer_name(layer.torch)}"
    stage = STAGE_NAMES[difference.stage]
    tensor = "" if difference.tensor == "loss" else difference.tensor
    return "unexplained: " + ", ".join(filter(None, [stage, f"step {difference.step}", tensor, first, residual]))


def _steps_needed(runs: Runs, workers: Workers, question: Question, report: Report) -> int:
    """Return the fewest steps, from the first that shows a difference, that give the right names."""
    first = max(min(difference.step for difference in report.differences), 1)
    if runs.starts or any(difference.kind == "numeric" for difference in report.differences):
        return 1
    for steps in range(first, question.steps):
        if right(
            _said(find_differences(runs.evidence(steps), InterruptibleSearches(workers, []), layers=False)),
            question.accepted,
        ):
            return steps - first + 1
    return question.steps - first + 1


def _traces(runs: Runs) -> Traces:
    return Traces(runs.torch, *(Lazy(records.__len__, partial(_plain, records)) for records in (runs.free, runs.jax)))


def _plain(records: Records, index: int) -> Record:
    """Return a record in which stages that a port's custom step does not show are those of its loss function alone."""
    record = records[index]
    missing = [name for name in ("local_loss", "local_gradients") if name not in record and f"pure_{name}" in record]
    return ChainMap({name: record[f"pure_{name}"] for name in missing}, record)  # type: ignore[arg-type]
