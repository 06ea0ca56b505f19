"""One step with other numbers of replicas and of examples, which numbers written into a port may count."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxddp.errors import InputError
from jaxddp.parity.compare.judge import judge
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.coverage import Trial
from jaxddp.parity.deviation import Statement
from jaxddp.parity.jax_side.child import Forced, jax_records
from jaxddp.parity.jax_side.number_lines import NumberLines
from jaxddp.parity.jax_side.twins import FindDraws
from jaxddp.parity.port import PortSource
from jaxddp.parity.port.draws import DrawnSource, paired
from jaxddp.parity.port.variants import Variant, with_variants
from jaxddp.parity.quote import Quote
from jaxddp.parity.records import Record
from jaxddp.parity.runs import Runs
from jaxddp.parity.torch_side.draw_weights import DrawWeights
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.steps import Steps
from jaxddp.parity.trials.runs import TrialRuns, Tried, judged
from jaxddp.parity.workers import Workers

NEAR = 1e-9  # relative; measured: 2e-16


class SizeTrials(TrialRuns):
    """Runs of both sides through one step of other sizes, each freely from the run's start."""

    shorter = Trial("batch", "with one example less")

    @property
    def more(self) -> Trial:
        """Return the trial of one more replica."""
        return self._replicas(self.case.world_size + 1)

    def sizes(self) -> Iterator[Tried]:
        """Yield each trial with what differs in it.

        Raises:
            ChildError: a side fails.
        """
        yield from self._more_and_shorter()
        if self.case.world_size > 1 and not self.runs.facts.multi_loss:  # it may ask torch for the number of ranks
            yield self._size(Variant(self._replicas(1)), 1)

    def _more_and_shorter(self) -> Iterator[Tried]:
        """Yield the trials of one more replica and of one example less: a single run if nothing differs in it."""
        count = self.case.world_size
        both = self._size(Variant(self.more, shorter=1), count + 1)
        if not both.differing and not both.trial.left_out:
            yield from (both, replace(both, trial=self.shorter))
            return
        yield self._size(Variant(self.more), count + 1)
        yield self._size(Variant(self.shorter, shorter=1), count)

    def _replicas(self, count: int) -> Trial:
        return Trial("replicas", f"with {count} replica{'s' * (count != 1)}")

    def _size(self, variant: Variant, count: int) -> Tried:
        """Let both sides take a step of a variant on so many replicas."""
        assert variant.trial is not None
        _, of_torch, of_jax = self.folders()
        variants, start = (variant,), self.runs.start
        try:
            source = self._source(variants)
        except InputError as error:
            return Tried(variant, replace(variant.trial, left_out=f"{error}"), {}, 0, variants)
        case = replace(self.case, source=source, world_size=count)
        steps = Steps(case.torch_source, "float64", count, case.steps, of_torch, start, variants=variants)
        summaries = self.workers.torch_of(count).do(steps)
        if why := next((summary.raised for summary in summaries if summary.raised), ""):
            return Tried(variant, replace(variant.trial, left_out=why), {}, 0, variants)
        self.workers.jax.do(Forced(case, start, of_torch, of_jax, replicas=count))
        torch_run, jax_run = torch_records(of_torch, count, summands=self.runs.summands), jax_records(of_jax)
        facts = self.runs.facts
        summary = self.runs.summary
        judgement = judge(torch_run, jax_run, facts, summary.optimizer, summary.highest)
        tried = Tried(variant, variant.trial, {}, 0, variants)
        tried = judged(tried, judgement, torch_run, jax_run, facts, self.slack(torch_run[0]))
        return replace(tried, factor=_factor(torch_run[0], jax_run[0], tried), sizes=summaries[0].sizes, count=count)

    def _source(self, variants: tuple[Variant]) -> PortSource:
        """Return a source of the variant's batches, with numbers for draws of their shapes.

        Raises:
            InputError: the draws of both sides are not pairs.
        """
        source = with_variants(self.case.source, variants, self.case.world_size)
        if not (isinstance(source, DrawnSource) and variants[0].shorter):
            return source
        case = replace(self.case, source=source.source)
        draw = DrawWeights(case.torch_source, "float64", self.folders()[0], self.case.seed)
        ((_, _, of_torch, _),) = self.workers.torch.do(draw)
        of_jax = self.workers.jax.do(FindDraws(case))
        for side, draws in (("torch", of_torch), ("jax", of_jax)):
            if isinstance(draws, InputError):
                why = str(draws).removeprefix(f"{Path(self.case.name).parent}/").rstrip(".")
                raise InputError(f"{side} fails: {why}")
        return replace(source, draws=paired(of_torch, of_jax))


def counted(runs: Runs, workers: Workers, tried: Tried) -> tuple[Statement, Quote | None] | None:
    """Return the number of the port that counts examples or replicas of the run, and its line.

    It counts what the trial has in another number, if jax's values are torch's times the ratio of both numbers.

    Returns:
        None: no number of the port explains the factor.
    """
    sizes = runs.summary.sizes
    of_trial = {what: size for size, what in tried.sizes.items()}
    pairs = {size: (what, of_trial[what]) for size, what in sizes.items() if what in of_trial}
    pairs[runs.case.world_size] = "the replicas", tried.count
    changed = {n: of_size for n, of_size in pairs.items() if of_size[1] != n}
    fits = {n: what for n, (what, now) in changed.items() if any(_is_near(tried.factor, x) for x in (now / n, n / now))}
    lines = workers.jax.do(NumberLines(runs.case, runs.start, tuple(fits))) if fits else {}
    number = next(iter(lines), None)
    if number is None:
        return None
    return Statement("number_of_run", number=number, counts=fits[number]), Quote.of(lines[number])


def _is_near(x: float, y: float) -> bool:
    return abs(x - y) <= NEAR * abs(y)


def _factor(torch: Record, jax: Record, tried: Tried) -> float:
    """Return the factor of jax's values of the first stage that differs to torch's; NaN if it is not one factor."""
    if not tried.differing:
        return math.nan
    stage = next(iter(tried.differing))
    of_jax, of_torch = jax[stage], torch[stage]
    dot = sum(float(np.vdot(of_torch[name], x)) for name, x in of_jax.items() if name in of_torch)
    factor = dot / sum(float(np.vdot(x, x)) for x in of_torch.values())
    scaled = {name: factor * x for name, x in of_torch.items()}
    return factor if max(residuals(of_jax, scaled).values()) <= NEAR else math.nan
