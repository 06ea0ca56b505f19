"""A number of torch's scheduler with which its rates are the port's, at every step to the end of the schedule."""

from collections.abc import Iterator
from dataclasses import replace

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.jax_side.rates import CompareRates
from jaxddp.parity.rate_curves import TorchRates
from jaxddp.parity.torch_side.schedule_numbers import OtherSchedules

FREE = "other_rate_at"  # form of a cause that only says how a rate differs
MOST = 8  # schedules that are compared to their end
MEASURED = "both schedules, stepped alone"


def with_schedule_number(evidence: Evidence, searches: InterruptibleSearches, ruling: Ruling | None) -> Ruling | None:
    """Return a ruling with the number of torch's scheduler that makes its rates the port's, if it has no other name.

    Args:
        evidence, searches: see `find_differences`.
        ruling: the ruling on the optimizer's updates; None: there was no search.
    """
    rates = [one.what for x in (ruling.named if ruling else ()) for one in x.deviations if one.what.form == FREE]
    if ruling is None or not rates:
        return ruling
    parts = dict(rates[0].parts)
    job = OtherSchedules(evidence.case.torch_source, evidence.case.steps, parts["step"] - 1, parts["jax"])
    tried = searches.run(lambda: searches.workers.torch.do(job)[0], problems=[]) or []
    equal = [value for value, of_torch in tried[:MOST] if _are_equal(evidence, searches, of_torch)]
    if not equal:
        return ruling
    named = tuple(one for hypothesis in ruling.named for one in _renamed(hypothesis, equal))
    return replace(ruling, named=named)


def _are_equal(evidence: Evidence, searches: InterruptibleSearches, torch: TorchRates) -> bool:
    """Return whether the port's rates are these at every step to the end."""
    job = CompareRates(evidence.case, evidence.start, torch)
    result = searches.run(lambda: searches.workers.jax.do(job), problems=[])
    # Where a schedule shows no end, all steps count as after it.
    return result is not None and not result.why_not and result.within is None and result.after is None


def _renamed(hypothesis: Hypothesis, values: list[Value]) -> Iterator[Hypothesis]:
    """Yield the hypothesis with each of the numbers in place of the rate that differs."""
    for value in values:
        what = Statement("schedule_number", of=value.call, key=value.key, jax=value.jax, torch=value.torch)
        deviations = tuple(
            Deviation(one.kind, what, (value,)) if one.what.form == FREE else one for one in hypothesis.deviations
        )
        yield replace(hypothesis, deviations=deviations, measured=MEASURED)
