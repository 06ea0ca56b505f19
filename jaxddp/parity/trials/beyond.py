"""Compare both sides beyond a run in which nothing differs, and say what differs there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from jaxddp.parity.coverage import Beyond, Trial, WithoutEffect
from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.cause_lines import SCHEDULE
from jaxddp.parity.diagnosis.differences import find_differences
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.without_effect import PASSES_ON, UNCALLED
from jaxddp.parity.findings import Difference, Problem
from jaxddp.parity.port.variants import Variant
from jaxddp.parity.runs import Runs
from jaxddp.parity.torch_side.variants import FIRST_MOMENTS
from jaxddp.parity.trials.long_run import LONG, after_many_steps
from jaxddp.parity.trials.runs import Tried
from jaxddp.parity.trials.sizes import SizeTrials, counted

T = TypeVar("T")


class BeyondRun:
    """Trials beyond a run.

    Args:
        runs: a run of a port, complete and without a difference.
        searches: runs the trials, and the searches for causes.
        causes: whether to look for causes.
    """

    def __init__(self, runs: Runs, searches: InterruptibleSearches, causes: bool):
        self._runs, self._searches, self._causes = runs, searches, causes
        self._trials = SizeTrials(runs, searches.workers)

    def compare(self) -> tuple[tuple[Trial, ...], tuple[Beyond, ...]]:
        """Return all trials, and what differs in them."""
        by_loss = self._runs.facts.custom_step
        model = [*self._tried(of_model(self._steps))]
        optimizer = [*self._tried(of_optimizer(self._has_moments(), by_loss))]
        if not self._runs.facts.multi_loss:
            optimizer += self._run(lambda: [after_many_steps(self._trials)], (Variant(LONG),))
        sizes = self._run(self._trials.sizes, (Variant(self._trials.more), Variant(self._trials.shorter)))
        beyond = [*self._explained(model), *self._explained(optimizer), *self._of_sizes(sizes)]
        # With weights of 0 no values are compared: that trial counts only for what it says.
        told = (one for one in (*model, *optimizer, *sizes) if one.variant.weights or one.trial.left_out)
        trials = {one.trial.what: one.trial for one in told}
        return tuple(trials.values()), tuple(beyond)

    @property
    def _steps(self) -> int:
        return self._runs.case.steps

    def _has_moments(self) -> bool:
        """Return whether both sides show the first moments of every parameter."""
        states = self._runs.evidence().judgement.residuals.get("optimizer_state", [])
        names = {name.partition(":")[2] for name in (states[0] if states else {}) if name.startswith(FIRST_MOMENTS)}
        return not self._runs.facts.multi_loss and names == self._runs.torch[0]["params"].keys()

    def _tried(self, variants: Sequence[Variant]) -> Iterator[Tried]:
        """Yield the trials of variants, in runs that are no longer than the check's, as a schedule may end with it."""
        for start in range(0, len(variants), self._steps):
            part = tuple(variants[start : start + self._steps])
            yield from self._run(partial(self._trials.tried, part), part)

    def _run(self, run: Callable[[], Iterable[Tried]], variants: Sequence[Variant]) -> list[Tried]:
        """Return the trials of a run; if it fails, they are left out."""
        problems: list[Problem] = []
        tried = self._searches.run(lambda: [*run()], problems)
        if tried is not None:
            return tried
        why = problems[0].message if problems else "the check was ended"
        left_out = [replace(variant.trial, left_out=why) for variant in variants if variant.trial is not None]
        return [Tried(Variant(trial), trial, {}, 0, ()) for trial in left_out]

    def _explained(self, tried: Sequence[Tried]) -> Iterator[Beyond]:
        """Yield what differs in a group of trials: each cause that the first one shows, with the others that differ."""
        differing = [one for one in tried if one.differing]
        if not differing:
            return
        first = differing[0]
        others = tuple(dict.fromkeys(one.trial for one in differing if one.trial != first.trial))
        evidence = None if first.trial == LONG else self._run_alone(lambda: self._trials.evidence(first))
        differences = [] if evidence is None else find_differences(evidence, self._searches)
        stages = [one.stage for one in differences if one.stage in first.differing]
        for stage in dict.fromkeys(stages or [*first.differing][:1]):
            causes = [one for one in differences if one.stage == stage]
            yield from (_beyond(first, stage, one, others) for one in causes or (None,))

    def _of_sizes(self, tried: Sequence[Tried]) -> Iterator[Beyond]:
        """Yield what differs with other sizes, once for each number of the port that explains it."""
        by_number: dict[Statement, Beyond] = {}
        for one in (one for one in tried if one.differing):
            beyond = _beyond(one, next(iter(one.differing)), None, ())
            number = self._run_alone(partial(counted, self._runs, self._searches.workers, one))
            if number is None:
                yield beyond
            elif (first := by_number.get(number[0])) is not None:
                by_number[number[0]] = replace(first, others=(*first.others, one.trial))
            else:
                by_number[number[0]] = replace(beyond, statements=number[:1], jax=number[1])
        yield from by_number.values()

    def _run_alone(self, search: Callable[[], T]) -> T | None:
        """Return the result of a search for a cause; None if it fails, or if none is to be sought."""
        return self._searches.run(search, []) if self._causes else None


def _beyond(tried: Tried, stage: str, difference: Difference | None, others: tuple[Trial, ...]) -> Beyond:
    located = tried.differing[stage]
    beyond = Beyond(tried.trial, stage, located.tensor, located.residual, located.allowed, others=others)
    if difference is None:
        return beyond
    cause = difference.cause
    # Rates are compared by themselves: an update that is left out for its size is not a rate of 0.
    if cause is None or {*cause.names} & {*SCHEDULE}:
        lines = difference if cause is None else cause
        return replace(beyond, jax=lines.jax, torch=lines.torch)
    return replace(beyond, statements=tuple(one.what for one in cause.deviations), jax=cause.jax, torch=cause.torch)


def with_idle_operations(beyond: Sequence[Beyond], idle: Sequence[WithoutEffect]) -> tuple[Beyond, ...]:
    """Name, for a difference that nothing explains, the only operation of its part that had no effect in the run."""
    return tuple(one if one.statements or one.trial.kind == "replicas" else _with_idle(one, idle) for one in beyond)


def _with_idle(beyond: Beyond, idle: Sequence[WithoutEffect]) -> Beyond:
    of_optimizer = beyond.stage in ("update", "params", "optimizer_state")
    fitting = [x for x in idle if x.why != UNCALLED and (x.why == PASSES_ON) == of_optimizer]
    if len(fitting) != 1:
        return beyond
    (operation,) = fitting
    jax, torch = (operation.line if operation.side == side else None for side in ("jax", "torch"))
    what = Statement("operation_of_one_side", code=operation.operation, of=operation.side)
    return replace(beyond, statements=(what,), jax=jax, torch=torch)


def of_model(steps: int) -> list[Variant]:
    """Return variants of weights and batch; with weights of 0 only what is not finite counts, as many values are equal.

    Args:
        steps: number of steps of the run.

    >>> [variant.trial.what for variant in of_model(10)][::4]
    ['with weights 4 times as large', 'with the examples of step 11']
    """
    return [
        Variant(Trial("weights", "with weights 4 times as large"), weights=4.0),
        Variant(Trial("weights", "with weights 4 times as small"), weights=0.25),
        Variant(Trial("batch", "with a batch 4 times as large"), batch=4.0),
        Variant(Trial("batch", "with a batch of the other sign"), batch=-1.0),
        Variant(Trial("batch", f"with the examples of step {steps + 1}"), step=steps),
        # The last one, as the optimizer of a `jax_step` keeps its own state, and ties may break either way here.
        Variant(Trial("weights", "with weights of 0"), weights=0.0),
    ]


def of_optimizer(has_moments: bool, by_loss: bool = False) -> list[Variant]:
    """Return variants of the gradients that the optimizer gets, one after the other, as its state remembers.

    Args:
        has_moments: both sides show the optimizer's first moments.
        by_loss: gradients can be changed only by a factor of the loss.

    >>> [variant.trial.what for variant in of_optimizer(True, by_loss=True) if variant.trial][-1]
    'with first moments 10,000 times as large'
    """
    moments = Trial("optimizer_state", "with first moments 10,000 times as large")
    variants = [
        Variant(),
        Variant(Trial("gradients", "with gradients 1000 times as large"), gradients=1e3),
        Variant(),
        Variant(Trial("gradients", "with gradients 1000 times as small"), gradients=1e-3),
        Variant(Trial("gradients", "with gradients of 0"), gradients=0.0),
        Variant(Trial("gradients", "with gradients of the other sign"), gradients=-1.0),
        Variant(Trial("gradients", "with one huge element among the gradients"), spike=1e6),
        *([Variant(moments, moments=1e4)] if has_moments else []),
        Variant(Trial("gradients", "with one NaN among the gradients"), spike=float("nan")),
    ]
    return [variant for variant in variants if not by_loss or variant.spike is None]
