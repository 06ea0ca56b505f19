"""Training loop: epochs of optimizer steps, their tests and their checkpoints."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxddp.distributed.stall import StallWatch
from jaxddp.errors import NotFiniteError, TrainingError
from jaxddp.nn.torch_weights import torch_name
from jaxddp.signals import Interruption
from jaxddp.state import TrainState
from jaxddp.step.metrics import InFlight, step_metrics
from jaxddp.tracking.gradient_metrics import renamed
from jaxddp.tracking.run_log import RunLog
from jaxddp.tracking.stopping import Stopping
from jaxddp.train.parts import Result, Run
from jaxddp.train.saver import Saver, notes_at
from jaxddp.train.tester import Tester

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"
MANY_SHAPES = 16  # of batches, from which on compiling is likely to take longer than training
TOO_MANY = "step {step}: {shapes} shapes of batch so far, a program compiled for each; pad to fewer in `collate`"


def train(
    run: Run,
    state: TrainState,
    log: RunLog,
    checkpoints: "Checkpoints | None",
    tell_stall: Callable[[str], None] | None = None,
) -> Result:
    """Train from `state` to the end of the last epoch; `tell_stall` is called if this process makes no progress.

    Raises:
        TrainingError: a loss is not finite, or replicas differ; checkpoints saved before remain valid.
        SystemExit: a signal has come; a checkpoint is saved.
    """
    config = run.config
    started = time.perf_counter()
    if checkpoints is not None:
        checkpoints.create()
    folder = None if checkpoints is None else config.output
    advice = f"; continue with --resume {folder}" if folder else ""
    stall = StallWatch(config.stall_timeout, advice, tell_stall, log.waiting)
    with stall, Interruption(folder, quiet=not run.is_first) as interruption:
        step = int(state.step)
        stopping = Stopping(config, notes_at(checkpoints, step), run.data.judged)
        saver = Saver(run, checkpoints, interruption, step, log, stopping)
        tester = Tester(run, log, stall, stopping, step)
        try:
            tester.begin(state)
            state, metrics = train_epochs(run, state, log, saver, tester, stopping, stall)
            weights = run.weights(state)
            if config.output is not None:
                saver.save_weights(WEIGHTS_FILE, weights)
                if (averaged := tester.averaged(state)) is not None:
                    saver.save_weights(AVERAGED_FILE, run.weights(averaged))
        except TrainingError as error:
            raise saver.with_last_good(error) from None
    ending = *filter(None, [stopping.reason]), config.agreement
    speed = run.throughput.lines(run.peak_memory(), run.share_of_peak) if run.is_first else []
    speed += run.compiled()
    log.summary(metrics, time.perf_counter() - started, *ending, split=run.data.judged, speed=speed)
    return Result(state, metrics, weights)


def as_notes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as the notes of a checkpoint, by which the best one is known."""
    return {f"test_{name}": value for name, value in metrics.items()}


def train_epochs(
    run: Run, state: TrainState, log: RunLog, saver: Saver, tester: Tester, stopping: Stopping, stall: StallWatch
) -> tuple[TrainState, dict[str, float]]:
    """Train for the epochs that are left, and test and save after each.

    Returns:
        The last state, and the metrics of the last test; of the training set, if there is no test set.
    """
    config = run.config

    def one_epoch(state: TrainState, epoch: int) -> tuple[TrainState, dict[str, float]]:
        state, train_means, speed, shown = train_epoch(run, state, epoch, log, saver, tester, stopping, stall)
        if not run.at_epoch_end(int(state.step)):  # stopped early
            return state, shown
        state, shown = tester.after_epoch(state, epoch, train_means, speed)
        if saver.due(int(state.step)) and epoch + 1 < config.epochs:
            state = run.verified(state)
            saver.save(state, **as_notes(shown))
        return state, shown

    shown: dict[str, float] = {}
    state = run.verified(state)
    while True:
        try:
            epoch = int(state.step) // run.loader.steps_per_epoch
            if epoch < config.epochs and stopping.reason is None:
                state, shown = one_epoch(state, epoch)
                continue
            shown = shown or tester.metrics(state)
            state = run.verified(state)
            saver.finish(state, **as_notes(shown))
            return state, shown
        except NotFiniteError as error:
            state, shown = saver.rolled_back(error), {}


def train_epoch(
    run: Run,
    state: TrainState,
    epoch: int,
    log: RunLog,
    saver: Saver,
    tester: Tester,
    stopping: Stopping,
    stall: StallWatch,
) -> tuple[TrainState, dict[str, float], float, dict[str, float]]:
    """Train for one epoch, or for the part of it after `state.step` and before an early stop.

    Returns:
        The state at the end, the means over the examples, examples per second, and metrics of the last test within.
    """
    speed = run.throughput
    speed.begin()
    step, examples = int(state.step), 0
    test: dict[str, float] = {}
    last: dict[str, float] = {}
    in_flight, totals = InFlight(step + 1, run.explain, run.loader.batch_of), saver.sums_until(step)

    def report(wait: bool) -> int:
        nonlocal last
        seen = 0
        for number, by_jax_name in in_flight.finished(wait, run.pace.run_ahead):
            sums = renamed(by_jax_name, torch_name)
            size = run.loader.examples_in(number - 1)
            last = step_metrics(sums)
            log.step(number, epoch + 1, last, examples=size)
            totals.add(sums)
            seen += size
        return seen

    def begin_dispatch() -> None:
        stall.doing(f"the batch of step {step + 1}")
        run.pace.begin()

    begin_dispatch()
    for batches in speed.waited_for(run.loader.epoch(epoch, start_step=step % run.loader.steps_per_epoch)):
        stall.doing(f"step {step + 1}")
        compiled, _ = run.ddp.programs
        state, sums = run.ddp.steps(state, batches)
        if compiled <= MANY_SHAPES < run.ddp.programs[0]:
            log.note(TOO_MANY.format(step=step + 1, shapes=MANY_SHAPES + 1))
        in_flight.add(sums)
        before, step = step, step + len(sums.table)
        saver.dispatched(step)
        examples += report(wait=False)
        run.pace.end()
        if run.config.verify_every and before // run.config.verify_every != step // run.config.verify_every:
            state = run.verified(state)
        if run.callback_period.passed("steps", before, step):
            examples += report(wait=True)
            with speed.paused():
                tester.tell("on_step_end", state, epoch, last)
        if (test_due := tester.due(step)) and not run.at_epoch_end(step):
            examples += report(wait=True)
            with speed.paused():
                state, test = tester.within_epoch(state, epoch)
        if not run.at_epoch_end(step) and saver.due(step):  # at the end, the epoch is tested and logged before
            examples += report(wait=True)
            state = run.verified(state)
            saver.save(state, **as_notes(test if test_due else {}))
        if stopping.reason is not None:
            break
        begin_dispatch()
    stall.doing(f"step {step}")
    examples += report(wait=True)
    log.histograms(step, totals.histograms())
    return state, totals.means(), speed.end(examples), test
