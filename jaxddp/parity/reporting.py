"""Judge the runs of a check, look for the causes of what differs, and build the report."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.cases import PortCase
from jaxddp.parity.catalogue import EDITS
from jaxddp.parity.compare.clipping import NOT_CLIPPED, reference_clipping, shows_clipping
from jaxddp.parity.compare.finite import NotFinite, first_not_finite
from jaxddp.parity.compare.free_running import drifts, free_running, grown_rounding, with_drift_of_rounding
from jaxddp.parity.compare.idle import idle
from jaxddp.parity.compare.numerics import compare_numerics, rounds_only
from jaxddp.parity.compare.types import compare_types
from jaxddp.parity.coverage import Aspect, Beyond, Trial, WithoutEffect
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.cause_lines import START, with_function_lines
from jaxddp.parity.diagnosis.differences import find_differences, unexplained
from jaxddp.parity.diagnosis.evaluation import evaluation_of
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.not_finite import on_both_sides, on_one_side
from jaxddp.parity.diagnosis.random_keys import repeated_keys
from jaxddp.parity.diagnosis.rounding import explain_rounding
from jaxddp.parity.diagnosis.without_effect import without_effect
from jaxddp.parity.environment import environment
from jaxddp.parity.findings import Cause, Difference, Numerics, Problem, StageResult
from jaxddp.parity.jax_side.excerpt_program import MANY
from jaxddp.parity.patch.edited_files import EditedFiles, edited_files
from jaxddp.parity.patch.initialisers import with_initialisers
from jaxddp.parity.patch.proposals import with_patches
from jaxddp.parity.progress import BEYOND, CAUSES, COMPARE, EVALUATION, KEYS, PATCHES, WITHOUT_EFFECT
from jaxddp.parity.rates import NAME as RATES
from jaxddp.parity.rates import Rates
from jaxddp.parity.records import Record, Records, is_large_model, total_loss
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.runs import Runs
from jaxddp.parity.trials.beyond import BeyondRun, with_idle_operations
from jaxddp.parity.workers import Workers

NO_RATES = Rates()
EXPRESSION = "other_expression"  # what both sides compute at a place, which may be the same but for rounding


def report_on(
    runs: Runs,
    workers: Workers,
    started: float,
    *,
    rates: Rates = NO_RATES,
    remarks: Sequence[str] = (),
    patch: bool = False,
    causes: bool = True,
    quick: bool = False,
) -> Report:
    """Return the report on these runs.

    Args:
        runs: records of both sides.
        workers: processes in which the diagnosis replays hypotheses.
        started: start of the check, by `time.monotonic`.
        rates: comparison of the learning rates after the run, and of the initialisation.
        remarks: sentences for the report.
        patch: whether to look for patches.
        causes: whether to look for the causes of differences.
        quick: compare neither the evaluation nor anything beyond the run.
    """
    return Reporting(runs, workers, causes, quick).report(started, rates, remarks, patch)


class Reporting:
    """Judge the runs of a check, look for causes, and build its report.

    Args:
        runs, workers, causes, quick: see `report_on`.
    """

    def __init__(self, runs: Runs, workers: Workers, causes: bool, quick: bool):
        self._runs, self._progress, self._causes, self._quick = runs, runs.progress, causes, quick
        self._untried = [*runs.progress.untried()]
        with self._progress.stage(COMPARE):
            self._spoiled = first_not_finite(runs.torch, runs.jax, runs.start)
            self._evidence = runs.evidence(_comparable(self._spoiled))
            self._problems = runs.problems + (_not_finite(runs) if self._spoiled is None else [])
        self._searches = InterruptibleSearches(workers, self._problems, self._progress)

    def report(self, started: float, rates: Rates, remarks: Sequence[str], patch: bool) -> Report:
        """Compare, and build the report; see `report_on`."""
        runs, evidence, progress = self._runs, self._evidence, self._progress
        differences, numerics, free = self._of_run()
        evaluation, of_evaluation = self._evaluation()
        differences += of_evaluation
        if self._searches.ended and not all(difference.cause for difference in differences):
            self._untried.append(CAUSES)
        types = compare_types(*runs.types, runs.summary.optimizer) if runs.types else None
        of_types = types.differences if types else ()
        further = len(of_types) + sum(one.step > runs.case.steps for one in rates.differences)
        files = edited_files(runs.case) if patch else None
        aspects = {**rates.aspects, **_with_sentence(rates)}
        if files is not None:
            differences = self._patched(differences, files, further)
            aspects |= {} if of_types or differences or rates.differences else self._with_initialisers(aspects, files)
        differences = [*of_types, *differences, *rates.differences]
        trials, beyond = self._beyond(differences)
        without, on_effects = self._without_effect(differences)
        remarks = (*remarks, *self._remarks(differences, free), *(types.sentences if types else ()), *on_effects)
        flags = runs.facts.unchecked
        not_checked = [f"Not part of the check: {listed(flags)}, which this file sets."] if flags else []
        return Report(
            port=runs.case.name,
            world_size=runs.case.world_size,
            steps=runs.case.steps,
            dtype=runs.case.dtype,
            stages=evidence.judgement.results(alone=not differences),
            unseen=_unseen(runs),
            losses=_losses(runs),
            differences=tuple(differences),
            numerics=numerics,
            trials=(*rates.trials, *trials),
            beyond=(*rates.beyond, *with_idle_operations(beyond, without)),
            aspects={**aspects, **({"types": types.aspect} if types else {}), **evaluation},
            without_effect=without,
            intended=dict(runs.facts.intended),
            problems=tuple(self._problems),
            names=runs.names,
            no_twin=runs.no_twin,
            free_running=free,
            idle=(*remarks, *not_checked),
            rate_rounding=evidence.judgement.rate_rounding,
            ended=progress.stop.why if self._untried else "",
            untried=tuple(self._untried) if progress.stop.why else (),
            patch=files.whole if files is not None else "",
            seconds=time.monotonic() - started,
            part_seconds={name: round(seconds, 3) for name, seconds in progress.seconds.items()},
            environment=environment(),
        )

    def _of_run(self) -> tuple[list[Difference], dict[str, Numerics], dict[str, StageResult]]:
        """Return what differs in the run, the comparison in float32, and that of both sides on their own."""
        runs, evidence, searches = self._runs, self._evidence, self._searches
        differences = self._in_float64()
        with self._progress.stage(COMPARE):
            numerics, numeric = _numerics(runs) if self._spoiled is None else ({}, [])
        differences = [
            replace(one, kind="numeric", cause=None)
            if (not one.cause or set(one.cause.names) <= {EXPRESSION}) and rounds_only(one, runs.jax32, runs.torch32)
            else one
            for one in differences
        ]
        semantic = any(difference.kind == "semantic" for difference in differences)
        # Rounding can be compared only if both sides mean the same, and over all steps.
        if not semantic and not self._untried:
            differences += [one for one in numeric if one.stage not in {d.stage for d in differences}]
            differences = explain_rounding(evidence, searches, numerics, differences) if self._causes else differences
        free = _free_running(runs, evidence, None if semantic else searches)
        if not semantic:
            differences += drifts(free, len(runs.jax), evidence.judgement.rate_rounding)
        return differences or ([] if self._problems else [*unexplained(evidence)]), numerics, free

    def _in_float64(self) -> list[Difference]:
        evidence, searches, spoiled = self._evidence, self._searches, self._spoiled
        if spoiled is not None and spoiled.side == "both":
            self._problems.append(on_both_sides(evidence, searches, spoiled))
        differences = _different_starts(self._runs, evidence, searches)
        differences += find_differences(evidence, searches, causes=self._causes)
        first_in_loss = bool(differences) and differences[0].stage == "local_loss"
        if self._causes and first_in_loss and not _in_catalogue(differences[0]) and spoiled is None:
            details = filter(None, [differences[0].detail, searches.run(self._runs.crossed_names)])
            differences[0] = replace(differences[0], detail="; ".join(details))
        if spoiled is None or spoiled.side == "both":
            return differences
        return on_one_side(evidence, searches, spoiled, differences)

    def _evaluation(self) -> tuple[dict[str, Aspect], list[Difference]]:
        runs = self._runs
        if self._quick or min(len(runs.torch), len(runs.jax)) < runs.case.steps:  # what has failed may fail again
            return {}, []
        with self._progress.stage(EVALUATION):
            aspects, differences = evaluation_of(self._evidence, self._searches, self._causes)
        if self._searches.ended:
            self._untried += [name for name, aspect in aspects.items() if aspect.verdict == "not compared"]
        return aspects, differences

    def _patched(self, differences: list[Difference], files: EditedFiles, further: int) -> list[Difference]:
        """Return the differences with their patches, which edit the texts of the files."""
        drifting = partial(drifts_freely, self._searches)
        differences = with_patches(self._runs, self._evidence, self._searches, differences, drifting, files, further)
        if self._searches.ended and differences:
            self._untried.append(PATCHES)
        return differences

    def _with_initialisers(self, aspects: Mapping[str, Aspect], files: EditedFiles) -> dict[str, Aspect]:
        """Edit the files so that tensors start as in torch, unless they need not; return the aspect that says so."""
        name = "initialisation"
        if name not in aspects or aspects[name].verdict != "differs" or name in dict(self._runs.facts.intended):
            return {}
        with self._progress.stage(PATCHES):
            says = self._searches.run(lambda: with_initialisers(self._runs, files), [])
        return {name: replace(aspects[name], says=(*aspects[name].says, says))} if says else {}

    def _beyond(self, differences: Sequence[Difference]) -> tuple[tuple[Trial, ...], tuple[Beyond, ...]]:
        """Compare beyond the run: only where everything in it is equal, and of a model that is small."""
        runs = self._runs
        complete = len(runs.torch) == len(runs.jax) == runs.case.steps and not self._progress.stop.why
        is_small = len(runs.start) <= MANY and not is_large_model(runs.start)
        if self._quick or self._problems or differences or not (complete and is_small):
            return (), ()
        if not isinstance(runs.case, PortCase):
            return (), ()
        # What fails in a trial is no problem of the check.
        searches = InterruptibleSearches(self._searches.workers, [], self._progress)
        with self._progress.stage(BEYOND):
            trials = BeyondRun(runs, searches, self._causes).compare()
        self._untried += [BEYOND] * searches.ended
        return trials

    def _without_effect(self, differences: Sequence[Difference]) -> tuple[tuple[WithoutEffect, ...], tuple[str, ...]]:
        """Return the operations without effect, and sentences on them and on random keys."""
        if differences or self._problems or self._untried:
            return (), ()
        with self._progress.stage(WITHOUT_EFFECT):
            operations, not_watched = without_effect(self._evidence, self._searches)
        with self._progress.stage(KEYS):
            keys = repeated_keys(self._evidence, self._searches)
        return operations, (*keys, *not_watched)

    def _remarks(self, differences: Sequence[Difference], free: dict[str, StageResult]) -> list[str]:
        """Return sentences on options that the run did not exercise, and on rounding that grows."""
        evidence = self._evidence
        remarks = [*idle(evidence.torch, reference_clipping(self._runs.facts), evidence.summands)]
        remarks += _uncounted(evidence.jax)
        return remarks if differences else [*remarks, *grown_rounding(free, evidence.judgement.rate_rounding)]


def _uncounted(jax: Sequence[Record]) -> list[str]:
    """Return a sentence if a `jax_step` returns a state with another number of steps than it has taken.

    >>> _uncounted([{"counted": {"step": np.int32(1)}}, {"counted": {"step": np.int32(1)}}])
    ['jax_step returns step 1 after step 1: return state.step + 1, by which others count.']
    """
    counts = [int(record["counted"]["step"]) for record in jax if "counted" in record]
    wrong = [pair for pair in enumerate(counts) if pair[1] != pair[0] + 1][:1]
    says = "jax_step returns step {1} after step {0}: return state.step + 1, by which others count."
    return [says.format(*pair) for pair in wrong]


def _with_sentence(rates: Rates) -> dict[str, Aspect]:
    """Return the comparison of the rates with what differs in them; nothing if they do not differ."""
    causes = [one.cause for one in rates.differences if one.stage == RATES and one.cause]
    says = tuple(f"{text[0].upper()}{text[1:]}." for cause in causes for text in sentences(cause))
    return {RATES: replace(rates.aspects[RATES], says=says)} if says else {}


def _in_catalogue(difference: Difference) -> bool:
    """Return whether the cause is a fault of the catalogue; an edit of a call may be two crossed names."""
    return difference.cause is not None and not set(difference.cause.names) <= EDITS.keys()


def _different_starts(runs: Runs, evidence: Evidence, searches: InterruptibleSearches) -> list[Difference]:
    """Return a difference if the port itself starts its replicas from different weights."""
    if not runs.starts:
        return []
    tensor = max(runs.starts, key=lambda name: runs.starts[name])
    what = Statement("replicas_start_apart", tensors=len(runs.starts))
    measured = f"the replicas' start differs by {runs.starts[tensor]:.2g} in {tensor}"
    (lines,) = with_function_lines(evidence, searches, None, START).lines
    cause = Cause.of([Deviation("different_start", what)], 0.0, measured=measured, lines=lines)
    return [Difference("params", 0, tensor, runs.starts[tensor], 0.0, cause=cause, detail="before the first step")]


def _numerics(runs: Runs) -> tuple[dict[str, Numerics], list[Difference]]:
    if not len(runs.jax32) or not len(runs.torch32):
        return {}, []
    return compare_numerics((runs.jax, runs.jax32), (runs.torch, runs.torch32), runs.facts)


def _free_running(runs: Runs, evidence: Evidence, searches: InterruptibleSearches | None) -> dict[str, StageResult]:
    """Compare both sides on their own, over the steps of the evidence; with `searches`, rounding may grow."""

    def compared(records: Records) -> dict[str, StageResult]:
        return free_running(runs.start, runs.torch, records, len(evidence.torch), rounding, evidence.summands)

    rounding = evidence.judgement.rate_rounding
    free = compared(runs.free)
    if searches is None or not any(drifts(free, 0, rounding)):
        return free
    rounded = searches.run(runs.rounded, problems=[])
    return free if rounded is None else with_drift_of_rounding(free, compared(rounded))


def drifts_freely(searches: InterruptibleSearches, runs: Runs) -> bool:
    """Return whether jax on its own drifts away from torch on its own."""
    evidence = runs.evidence()
    return any(drifts(_free_running(runs, evidence, searches), len(runs.jax), evidence.judgement.rate_rounding))


def _losses(runs: Runs) -> tuple[tuple[float, float], ...]:
    count = max(len(runs.torch), len(runs.free))
    return tuple((_mean_loss(runs.torch, step), _mean_loss(runs.free, step)) for step in range(count))


def _comparable(spoiled: NotFinite | None) -> int | None:
    """Return how many steps can be compared; None: all, since each is taken from the reference's state."""
    if spoiled is None or spoiled.side == "jax":
        return None
    return spoiled.step + (spoiled.side == "torch")


def _not_finite(runs: Runs) -> list[Problem]:
    """Return a problem for each side whose loss is not finite when it runs by itself, at the first such step."""
    problems = []
    for side, records in (("torch", runs.torch), ("jax", runs.free)):
        steps = [step for step in range(len(records)) if not math.isfinite(_mean_loss(records, step))]
        if steps:
            problems.append(Problem(side, f"step {steps[0] + 1}", "the loss is not a finite number", leads=True))
    return problems


def _unseen(runs: Runs) -> tuple[str, ...]:
    """Return the stages that the port computes but does not show."""
    if not len(runs.jax):
        return ()
    first = runs.jax[0]
    hidden = ["gradients"] if "gradients" not in first else []
    if reference_clipping(runs.facts) != NOT_CLIPPED and not shows_clipping(first, runs.facts):
        hidden.append("clipped_gradients")
    return tuple(hidden)


def _mean_loss(records: Sequence[Record], step: int) -> float:
    if step >= len(records):
        return math.nan
    return float(np.mean(total_loss(records[step])))
