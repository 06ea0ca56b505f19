"""Compare the learning rates of both sides beyond the run of a check, to the end of their schedules."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.coverage import Aspect, Beyond, Trial
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import Cause, Difference
from jaxddp.parity.jax_side.optimizer_line import JaxOptimizerLine
from jaxddp.parity.jax_side.rates import CompareRates, CompareUpdates
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import Lines, OptimizerLines
from jaxddp.parity.processes import ChildError
from jaxddp.parity.quote import Quote
from jaxddp.parity.rate_curves import ALLOWED, RateDifference, RatesComparison, TorchRates, chosen_steps, steps_between
from jaxddp.parity.records import is_large_model
from jaxddp.parity.runs import Runs
from jaxddp.parity.torch_side.optimizer_line import TorchOptimizerLine
from jaxddp.parity.torch_side.rates import ReadTorchRates
from jaxddp.parity.torch_side.updates_at import UpdatesAt
from jaxddp.parity.workers import Workers

NAME = "rates"
FAULT = "schedule"
STAGES = ("update", "hyperparameters")  # where one of these differs, no rates of the run are alike
ROUNDS = 3  # of chosen steps, each between two of the last
UNEQUAL = "The rates after this run were not compared, because the updates differ in it."


class Rates(NamedTuple):
    """What is said of the rates.

    Attributes:
        aspects: the aspect by its name; {}: there was no run to compare.
        differences: at most one, before the end of the schedule.
        beyond: at most one, after it.
        trials: the steps after the end, if they were compared.
    """

    aspects: Mapping[str, Aspect] = MappingProxyType({})
    differences: tuple[Difference, ...] = ()
    beyond: tuple[Beyond, ...] = ()
    trials: tuple[Trial, ...] = ()


def compare_rates(runs: Runs, workers: Workers, total_steps: int | None) -> Rates:
    """Compare the rates of both sides.

    Args:
        runs: complete runs in float64.
        workers: processes of both sides.
        total_steps: length of the run that the port is for; None: as its schedules show.
    """
    if runs.problems or not len(runs.jax):
        return Rates()
    if any(stage in runs.evidence().judgement.first for stage in STAGES):
        return not_compared(UNEQUAL)
    try:
        (torch,) = workers.torch.do(ReadTorchRates(runs.case.torch_source, runs.case.steps, total_steps))
        if why := torch.why_not or _unlike_run(torch, runs):
            return not_compared(f"The rates after this run were not compared: {why}.")
        if is_large_model(runs.start):
            workers.end_torch(patience=10.0)
        return _rates(runs, workers, torch, compared(runs.case, runs.start, workers, torch))
    except ChildError as error:
        workers.end_after(error)
        return not_compared(f"The rates after this run were not compared: {error.what}")


def not_compared(why: str) -> Rates:
    """Return that the rates were not compared, and why."""
    return Rates({NAME: Aspect("not compared", (why,))})


def _unlike_run(torch: TorchRates, runs: Runs) -> str:
    """Return why torch's scheduler, stepped alone, does not give the rates of the run; "": it does."""
    for step, record in enumerate(runs.torch):
        of_run = [group["lr"] for group in record.notes["groups"]]
        alone = [lr[min(step, len(lr) - 1)] for lr in torch.lr]
        if len(of_run) != len(alone) or not all(map(math.isclose, of_run, alone)):
            return f"stepped alone, torch's scheduler gives other rates than in the run, first at step {step}"
    return ""


def compared(case: AnyCase, start: Arrays, workers: Workers, torch: TorchRates) -> RatesComparison:
    """Compare a port's rates with torch's at every step, or its updates at some steps if the rates cannot be read.

    Args:
        case: model or port.
        start: initial weights of the reference.
        workers: processes of both sides.
        torch: torch's rates.

    Raises:
        ChildError: a side fails.
    """
    result: RatesComparison = workers.jax.do(CompareRates(case, start, torch))
    if not result.why_not or not result.alone or result.within is not None or result.after is not None:
        return result
    steps = chosen_steps(torch, case.steps)
    for _ in range(ROUNDS):
        (updates,) = workers.torch.do(UpdatesAt(case.torch_source, start, torch, steps, case.steps))
        of_updates: RatesComparison | None = workers.jax.do(CompareUpdates(case, start, torch, steps, updates))
        if of_updates is None:
            return result
        first = of_updates.within or of_updates.after
        result = of_updates
        if first is None or steps[steps.index(first.step) - 1] == first.step - 1:
            break
        steps = steps_between(steps, first.step, case.steps)
    return result


def _rates(runs: Runs, workers: Workers, torch: TorchRates, result: RatesComparison) -> Rates:
    several = len(torch.groups) > 1
    after = "" if torch.last is None else f"{torch.length:,}"
    trial = Trial(NAME, f"after step {after or f'{runs.case.steps:,}'}")
    trials = () if result.constant or torch.steps <= (torch.last or 0) + 1 else (trial,)
    if result.within is not None:
        what, aspect = result.within.statement(several), Aspect("differs", (), *_numbers(result.within))
        return Rates({NAME: aspect}, (_difference(result.within, what, _lines(runs, workers, result.within)),))
    beyond: tuple[Beyond, ...] = ()
    if result.after is not None:
        jax, torch_line = map(Quote.of, _lines(runs, workers, result.after))
        tensor, residual = result.after.tensor if several else "", result.after.residual
        what = result.after.statement(several)
        beyond = (Beyond(trial, NAME, tensor, residual, ALLOWED, (what,), jax, torch_line),)
    if result.why_not:
        return Rates({NAME: Aspect("not compared", tuple(result.why_not))}, (), beyond, trials)
    worst, step, tensor = result.worst
    return Rates({NAME: Aspect("equal", (), worst, step, ALLOWED, tensor)}, (), beyond, trials)


def _numbers(difference: RateDifference) -> tuple[float, int, float, str]:
    return difference.residual, difference.step, ALLOWED, difference.tensor


def _difference(difference: RateDifference, what: Statement, lines: Lines) -> Difference:
    cause = Cause.of([Deviation(FAULT, what)], 0.0, measured=MEASURED, lines=lines)
    residual, step, allowed, tensor = _numbers(difference)
    return Difference(NAME, step, tensor, residual, allowed, cause=cause)


def _lines(runs: Runs, workers: Workers, difference: RateDifference) -> Lines:
    """Return the lines at which both sides make the schedule of a tensor, or its optimizer without one."""
    try:
        jax = workers.jax.do(JaxOptimizerLine(runs.case, runs.start, difference.tensor))
        torch = workers.torch.do(TorchOptimizerLine(runs.case.torch_source, difference.tensor))[0]
    except ChildError as error:
        workers.end_after(error)
        jax = torch = OptimizerLines()
    return Lines(jax.schedule or jax.optimizer, torch.schedule or torch.optimizer)


MEASURED = "both schedules, stepped alone"
