"""Parity check: run both sides through the same steps, compare every stage, and explain the differences.

torch on its own, float64     the reference
jax forced by the reference   compares each stage, given equal inputs
jax on its own                shows what the state carries from step to step
both forced, float32          rounding, each side against its own float64 run
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxddp.errors import InputError, listed
from jaxddp.parity.cases import Case, PortCase
from jaxddp.parity.catalogue import EDITS
from jaxddp.parity.compare.clipping import NOT_CLIPPED, reference_clipping, shows_clipping
from jaxddp.parity.compare.finite import NotFinite, first_not_finite
from jaxddp.parity.compare.free_running import drifts, free_running, grown_rounding, with_drift_of_rounding
from jaxddp.parity.compare.idle import idle
from jaxddp.parity.compare.numerics import compare_numerics, rounds_only
from jaxddp.parity.compare.types import compare_types
from jaxddp.parity.coverage import Beyond, Trial
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
from jaxddp.parity.initialisation import initialisation
from jaxddp.parity.jax_side.excerpt_program import MANY
from jaxddp.parity.patch.proposals import with_patches
from jaxddp.parity.port import Port, PortFile, PortSource
from jaxddp.parity.processes import end_if_importing
from jaxddp.parity.progress import (
    BEYOND,
    CAUSES,
    COMPARE,
    DRAW,
    EVALUATION,
    FLOAT32,
    FORCED,
    FREE,
    INITIAL,
    KEYS,
    PATCHES,
    RATES,
    WITHOUT_EFFECT,
    Progress,
)
from jaxddp.parity.rates import Rates, compare_rates
from jaxddp.parity.records import Record, Records, is_large_model, total_loss
from jaxddp.parity.report.report import Report
from jaxddp.parity.runs import Runs
from jaxddp.parity.stopping import Stop, Stopped
from jaxddp.parity.trials.beyond import BeyondRun, with_idle_operations
from jaxddp.parity.workers import Workers

ENDING = 10.0  # seconds in which processes may end by themselves


def check(
    port: str | Path | PortSource | Case,
    *,
    world_size: int = 2,
    steps: int = 10,
    seed: int = 0,
    platform: str | None = None,
    torch_platform: str = "cpu",
    timeout: float = 300.0,
    num_processes: int = 1,
    numerics: bool = True,
    limit: float | Stop | None = None,
    workers: Workers | None = None,
    tell: Callable[[str], None] | None = None,
    flags: Sequence[str] = (),
    patch: bool = False,
    causes: bool = True,
    quick: bool = False,
    total_steps: int | None = None,
) -> Report:
    """Check that a port trains exactly like its torch original, and explain the differences.

    Ctrl-C, and SIGTERM sent to the command, end the check early: the report has what was found, and `ended` and
    `untried` say what it lacks. A second Ctrl-C raises `KeyboardInterrupt`.

    Call it under `if __name__ == "__main__":` in a script, because the worker processes import the script too.

    Args:
        port: a port file, an object that makes a port in another process, or a case of a built-in model, which
            has its own world size and steps.
        world_size: number of replicas on each side.
        steps: number of optimizer steps.
        seed: seed from which torch draws the weights.
        platform: "cpu" or "gpu", for jax; None for GPUs if there are any.
        torch_platform: "cpu" or "gpu", for torch; several ranks may share a GPU.
        timeout: seconds without a message after which a process counts as hanging.
        num_processes: number of processes that share jax's replicas, on CPU devices; it divides `world_size`.
        numerics: whether to run in float32 too.
        limit: seconds after which the check ends early; or a `Stop`, which other checks share. None: no limit.
        workers: processes to reuse from check to check; None for new ones.
        tell: called from another thread with a line about the progress every 30 seconds, and with one about the memory
            of a large model before it is used. None: print them on stderr; on a terminal, one line is rewritten.
        flags: flags of a run file's options and of its trainers: `["--layers", "2", "--lr", "0.1"]`.
        patch: whether to look for edits of the JAX side's files that remove the differences; no file is changed.
        causes: whether to look for the causes of differences. The verdict does not depend on it, and takes less time.
        quick: whether to compare the run, types and rates alone.
        total_steps: optimizer steps of the whole training, up to which the learning rates of both sides must be equal;
            None: as the port says, or torch's scheduler shows.

    Returns:
        The report; errors in the port are among its problems and raise nothing here.

    Raises:
        InputError: `port` is a `Port` itself, which cannot be sent to other processes.

    Example:
        report = jaxddp.parity.check("my_port.py")
        assert report.verdict == "equal", str(report)
    """
    end_if_importing()
    if isinstance(port, Port):
        raise InputError("check: a Port cannot be sent to other processes; must be its file, or an object with port()")
    started = time.monotonic()
    source = PortFile(str(port), world_size, tuple(flags)) if isinstance(port, str | Path) else port
    case = source if isinstance(source, Case) else PortCase(source, world_size, steps, seed=seed)
    stop, shared = (limit, True) if isinstance(limit, Stop) else (Stop(limit), False)
    progress = Progress(case.steps, (DRAW, FREE, FORCED, *[FLOAT32] * numerics), stop, tell)
    with contextlib.ExitStack() as context:
        if not shared:
            context.enter_context(stop.listening(signal.SIGINT))
        context.enter_context(progress.shown())
        crew = workers or context.enter_context(
            Workers(case.world_size, platform, timeout, torch_platform, num_processes)
        )
        crew.watch = progress.watch
        context.callback(setattr, crew, "watch", lambda children: None)
        runs = Runs(case, crew, seed, progress)
        remarks: tuple[str, ...] = ()
        rates = Rates()
        try:
            with stop.raising():  # a process starts only once the imports that all processes share are done
                runs.in_float64()
                runs, remarks = _with_wide_arrays(runs, case, crew)
                rates = rates_and_start(runs, crew, total_steps, quick)
                if numerics and len(runs.torch) and len(runs.jax):
                    runs.in_float32()
        except Stopped:
            crew.end()
        report = report_on(runs, crew, started, patch, remarks, causes, rates, quick)
        if workers is None and math.isfinite(stop.left):
            crew.end(patience=min(ENDING, stop.left))  # the report must not wait for processes beyond the limit
        return report


def rates_and_start(runs: Runs, workers: Workers, total_steps: int | None = None, quick: bool = False) -> Rates:
    """Compare the learning rates to their end and, unless `quick`, how both models draw their initial weights."""
    with runs.progress.stage(RATES):
        rates = compare_rates(runs, workers, total_steps)
    with runs.progress.stage(INITIAL):
        initial = None if quick else initialisation(runs)
    return rates if initial is None else rates._replace(aspects={**rates.aspects, "initialisation": initial})


def _with_wide_arrays(runs: Runs, case: PortCase | Case, workers: Workers) -> tuple[Runs, tuple[str, ...]]:
    """Return runs whose arrays in float32 are float64, with a remark on them, if these runs then differ in nothing."""
    if not (arrays := runs.narrow_arrays()) or not isinstance(case, PortCase):
        return runs, ()
    wide = Runs(replace(case, wide=True), workers, runs.seed, runs.progress)
    wide.in_float64()
    wide.types = runs.types  # as written
    if wide.problems or not len(wide.jax) or (evidence := wide.evidence()).judgement.first:
        return runs, ()
    problems: list[Problem] = []
    searches = InterruptibleSearches(workers, problems, runs.progress)
    differs = find_differences(evidence, searches) or [*unexplained(evidence)] or _drifts_freely(searches, wide)
    if differs or problems or searches.ended:
        return runs, ()
    return wide, (f"{listed(arrays)}: declared in float32. This check has them in float64, and nothing else differs.",)


def report_on(
    runs: Runs,
    workers: Workers,
    started: float,
    patch: bool = False,
    remarks: Sequence[str] = (),
    causes: bool = True,
    rates: Rates = Rates(),  # noqa: B008
    quick: bool = False,
) -> Report:
    """Return the report on these runs.

    Args:
        runs: records of both sides.
        workers: processes in which the diagnosis replays hypotheses.
        started: start of the check, by `time.monotonic`.
        patch: whether to look for patches.
        remarks: sentences for the report.
        causes: whether to look for the causes of differences.
        rates: comparison of the learning rates after the run, and of the initialisation.
        quick: compare neither the evaluation nor anything beyond the run.
    """
    progress, untried = runs.progress, [*runs.progress.untried()]
    with progress.stage(COMPARE):
        spoiled = first_not_finite(runs.torch, runs.jax, runs.start)
        evidence = runs.evidence(_comparable(spoiled))
        problems = runs.problems + (_not_finite(runs) if spoiled is None else [])
    searches = InterruptibleSearches(workers, problems, progress)
    if spoiled is not None and spoiled.side == "both":
        problems.append(on_both_sides(evidence, searches, spoiled))
    differences = _different_starts(runs, evidence, searches) + find_differences(evidence, searches, causes=causes)
    first_in_loss = bool(differences) and differences[0].stage == "local_loss"
    if causes and first_in_loss and not _in_catalogue(differences[0]) and spoiled is None:
        details = filter(None, [differences[0].detail, searches.run(runs.crossed_names)])
        differences[0] = replace(differences[0], detail="; ".join(details))
    if spoiled is not None and spoiled.side != "both":
        differences = on_one_side(evidence, searches, spoiled, differences)
    with progress.stage(COMPARE):
        numerics, numeric = _numerics(runs) if spoiled is None else ({}, [])
    differences = [
        replace(one, kind="numeric") if not one.cause and rounds_only(one, runs.jax32, runs.torch32) else one
        for one in differences
    ]
    semantic = any(difference.kind == "semantic" for difference in differences)
    if not semantic and not untried:  # rounding can be compared only if both sides mean the same, and over all steps
        differences += [one for one in numeric if one.stage not in {d.stage for d in differences}]
        differences = explain_rounding(evidence, searches, numerics, differences) if causes else differences
    free, rate_rounding = _free_running(runs, evidence, searches), evidence.judgement.rate_rounding
    if not semantic:
        differences += drifts(free, len(runs.jax), rate_rounding)
    differences = differences or ([] if problems else [*unexplained(evidence)])
    with progress.stage(EVALUATION):
        evaluation, of_evaluation = ({}, []) if quick else evaluation_of(evidence, searches, causes)
    differences += of_evaluation
    untried += [name for name, aspect in evaluation.items() if searches.ended and aspect.verdict == "not compared"]
    if searches.ended and not all(one.cause for one in differences):
        untried.append(CAUSES)
    diff = ""
    if patch:
        differences, diff = with_patches(runs, evidence, searches, differences, partial(_drifts_freely, searches))
    if patch and searches.ended and differences:
        untried.append(PATCHES)
    types = compare_types(*runs.types, runs.summary.optimizer) if runs.types else None
    differences = [*(types.differences if types else ()), *differences, *rates.differences]
    trials, beyond = tuple[Trial, ...](), tuple[Beyond, ...]()
    if _may_go_beyond(runs, problems, differences, quick):
        of_trials = InterruptibleSearches(workers, [], progress)  # what fails in them is no problem of the check
        with progress.stage(BEYOND):
            trials, beyond = BeyondRun(runs, of_trials, causes).compare()
        untried += [BEYOND] * of_trials.ended
    exercised = idle(evidence.torch, reference_clipping(runs.facts), evidence.summands)
    grown = [] if differences else grown_rounding(free, rate_rounding)
    equal = not (differences or problems or untried)
    with progress.stage(WITHOUT_EFFECT):
        without, not_watched = without_effect(evidence, searches) if equal else ((), ())
    with progress.stage(KEYS):
        keys = repeated_keys(evidence, searches) if equal else ()
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
        aspects={**rates.aspects, **({"types": types.aspect} if types else {}), **evaluation},
        without_effect=without,
        intended=dict(runs.facts.intended),
        problems=tuple(problems),
        names=runs.names,
        no_twin=runs.no_twin,
        free_running=free,
        idle=(*remarks, *exercised, *grown, *(types.sentences if types else ()), *keys, *not_watched, *not_checked),
        rate_rounding=rate_rounding,
        ended=progress.stop.why if untried else "",
        untried=tuple(untried) if progress.stop.why else (),
        patch=diff,
        seconds=time.monotonic() - started,
        part_seconds={name: round(seconds, 3) for name, seconds in progress.seconds.items()},
        environment=environment(),
    )


def _may_go_beyond(runs: Runs, problems: Sequence[Problem], differences: Sequence[Difference], quick: bool) -> bool:
    """Return whether to compare beyond the run: only where everything in it is equal, and of a model that is small."""
    complete = len(runs.torch) == len(runs.jax) == runs.case.steps and not runs.progress.stop.why
    is_small = len(runs.start) <= MANY and not is_large_model(runs.start)
    return complete and is_small and isinstance(runs.case, PortCase) and not (quick or problems or differences)


def _in_catalogue(difference: Difference) -> bool:
    """Return whether the cause is a fault of the catalogue; an edit of a call may stand for two crossed names."""
    return difference.cause is not None and not set(difference.cause.names) <= EDITS.keys()


def _different_starts(runs: Runs, evidence: Evidence, searches: InterruptibleSearches) -> list[Difference]:
    """Return a difference if the port itself starts its replicas from different weights."""
    if not runs.starts:
        return []
    tensor = max(runs.starts, key=lambda name: runs.starts[name])
    says = f"the replicas start from different weights, in {len(runs.starts)} tensors"
    measured = f"the replicas' start differs by {runs.starts[tensor]:.2g} in {tensor}"
    (lines,) = with_function_lines(evidence, searches, None, START).lines
    cause = Cause.of(("different_start",), (says,), 0.0, measured=measured, lines=lines)
    return [Difference("params", 0, tensor, runs.starts[tensor], 0.0, cause=cause, detail="before the first step")]


def _numerics(runs: Runs) -> tuple[dict[str, Numerics], list[Difference]]:
    if not len(runs.jax32) or not len(runs.torch32):
        return {}, []
    return compare_numerics((runs.jax, runs.jax32), (runs.torch, runs.torch32), runs.facts)


def _free_running(runs: Runs, evidence: Evidence, searches: InterruptibleSearches) -> dict[str, StageResult]:
    """Compare both sides on their own, over the steps of the evidence."""

    def compared(records: Records) -> dict[str, StageResult]:
        return free_running(runs.start, runs.torch, records, len(evidence.torch), rounding, evidence.summands)

    rounding = evidence.judgement.rate_rounding
    free = compared(runs.free)
    if any(drifts(free, 0, rounding)) and (rounded := searches.run(runs.rounded, problems=[])) is not None:
        return with_drift_of_rounding(free, compared(rounded))
    return free


def _drifts_freely(searches: InterruptibleSearches, runs: Runs) -> bool:
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
