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
from pathlib import Path

from jaxddp.config.options import Platform
from jaxddp.errors import InputError, listed
from jaxddp.parity.cases import Case, PortCase
from jaxddp.parity.diagnosis.differences import find_differences, unexplained
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Problem
from jaxddp.parity.initialisation import initialisation
from jaxddp.parity.port import Port, PortFile, PortSource
from jaxddp.parity.processes import end_if_importing
from jaxddp.parity.progress import DRAW, FLOAT32, FORCED, FREE, INITIAL, RATES, Progress
from jaxddp.parity.rates import Rates, compare_rates
from jaxddp.parity.report.report import Report
from jaxddp.parity.reporting import drifts_freely, report_on
from jaxddp.parity.runs import Runs
from jaxddp.parity.stopping import Stop, Stopped
from jaxddp.parity.workers import Workers

ENDING = 10.0  # seconds in which processes may end by themselves


def check(
    port: str | Path | PortSource | Case,
    *,
    world_size: int = 2,
    steps: int = 10,
    seed: int = 0,
    platform: Platform | None = None,
    torch_platform: Platform = "cpu",
    stall_timeout: float = 300.0,
    num_processes: int = 1,
    numerics: bool = True,
    time_limit: float | Stop | None = None,
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
        port: a program, an object that makes a port in another process, or a case of a built-in model, which
            has its own world size and steps.
        world_size: number of replicas on each side.
        steps: number of optimizer steps.
        seed: seed from which torch draws the weights.
        platform: "cpu" or "gpu", for jax; None for GPUs if there are any.
        torch_platform: "cpu" or "gpu", for torch; several ranks may share a GPU.
        stall_timeout: seconds without a message after which a process counts as hanging.
        num_processes: number of processes that share jax's replicas, on CPU devices; it divides `world_size`.
        numerics: whether to run in float32 too.
        time_limit: seconds after which the check ends early; or a `Stop`, which other checks share. None: no limit.
        workers: processes to reuse from check to check; None for new ones.
        tell: called from another thread with a line about the progress every 30 seconds, and with one about the memory
            of a large model before it is used. None: print them on stderr; on a terminal, one line is rewritten.
        flags: flags of a program's options and of its trainers: `["--layers", "2", "--lr", "0.1"]`.
        patch: whether to look for edits of the JAX side's files that remove the differences; no file is changed.
        causes: whether to look for the causes of differences. The verdict does not depend on it, and takes less time.
        quick: whether to compare only the run, types and rates.
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
    stop, shared = (time_limit, True) if isinstance(time_limit, Stop) else (Stop(time_limit), False)
    progress = Progress(case.steps, (DRAW, FREE, FORCED, *[FLOAT32] * numerics), stop, tell)
    with contextlib.ExitStack() as context:
        if not shared:
            context.enter_context(stop.listening(signal.SIGINT))
        context.enter_context(progress.shown())
        crew = workers or context.enter_context(
            Workers(case.world_size, platform, stall_timeout, torch_platform, num_processes)
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
        report = report_on(runs, crew, started, rates=rates, remarks=remarks, patch=patch, causes=causes, quick=quick)
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
    differs = find_differences(evidence, searches) or [*unexplained(evidence)] or drifts_freely(searches, wide)
    if differs or problems or searches.ended:
        return runs, ()
    return wide, (f"{listed(arrays)}: declared in float32. This check has them in float64, and nothing else differs.",)
