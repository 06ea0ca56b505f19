"""Training loop: epochs of optimizer steps, their tests and their checkpoints."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data_parallel import DataParallel
from jaxddp.distributed.agreement import Agreement
from jaxddp.distributed.stall import StallWatch
from jaxddp.errors import DriftError, MovedError, NotFiniteError, TrainingError
from jaxddp.loader import Loader
from jaxddp.nn.torch_weights import save_weights, torch_name
from jaxddp.signals import Interruption
from jaxddp.state import TrainState
from jaxddp.step.metrics import EpochSums, InFlight, means, step_metrics
from jaxddp.tracking.gradient_metrics import explained, renamed
from jaxddp.tracking.resumed import notes_of_run
from jaxddp.tracking.run_log import RunLog

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"
MAX_ROLLBACKS = 3  # in one process


@dataclass(frozen=True)
class Run:
    """Parts of a run, which have been checked to fit each other; nothing has been written yet."""

    config: TrainConfig
    dataset: datasets.Dataset
    loader: Loader
    ddp: DataParallel
    start: TrainState

    @property
    def saved_config(self) -> TrainConfig:
        """Configuration as the run folder keeps it, with the number of devices."""
        return dataclasses.replace(self.config, resume=None, devices=self.ddp.world_size)

    @property
    def is_first(self) -> bool:
        """Return whether this process prints, logs and saves weights: the one that has replica 0."""
        return 0 in self.ddp.replicas.local_ranks

    def explain(self, sums: Mapping[str, float]) -> str | None:
        """Describe the gradients that are not finite, from a step's metrics; None without --detect-anomaly."""
        frozen = self.ddp.frozen_parameters
        learning = [name for name in self.ddp.functional.params if name not in frozen]
        return explained(sums, learning, torch_name) if self.config.detect_anomaly else None

    def verified(self, state: TrainState) -> TrainState:
        """Return a state that is equal on all replicas: the given one or, with --on-drift repair, the majority's.

        Raises:
            DriftError: replicas differ, and are not to be repaired or have no majority.
        """
        try:
            self.ddp.verify(state)
        except DriftError as error:
            if self.config.on_drift != "repair" or error.healthy is None:
                raise
            if self.is_first:
                print(f"{error}; repaired from replica {error.healthy}", file=sys.stderr, flush=True)
            return self.ddp.repaired(state, error.healthy)
        return state

    def at_epoch_end(self, step: int) -> bool:
        """Return whether an epoch ends with this step."""
        return step % self.loader.steps_per_epoch == 0


class Saver:
    """Save the checkpoints of a run: decide when one is due, and add notes to the state.

    Args:
        run: the run.
        checkpoints: where to save; None: nowhere.
        interruption: signals, after which a checkpoint is due and the run stops.
        start_step: step from which the run continues.
        log: log of the run, whose records a checkpoint must not outlive.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: "Checkpoints | None",
        interruption: Interruption,
        start_step: int,
        log: RunLog,
    ):
        self._run = run
        self._log = log
        self._checkpoints = checkpoints
        self._interruption = interruption
        self._agreed = Agreement(run.ddp.replicas)
        self._signal = 0  # on which all processes agree
        self._period = run.config.checkpoint_period
        self._started = time.monotonic()
        self._seen = self._position(start_step)
        self._rollbacks = 0
        self.reached = start_step
        """Number of the last step that was dispatched."""

    def _position(self, step: int) -> dict[str, float]:
        minutes = (time.monotonic() - self._started) / 60
        return {"epochs": step // self._run.loader.steps_per_epoch, "steps": step, "minutes": minutes}

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step; call it once per step."""
        self._interruption.listen()  # from the first step on; before, a signal ends the process as always
        before, self._seen = self._seen, self._position(step)
        passed = {unit for unit in before if self._period.passed(unit, before[unit], self._seen[unit])}
        if self._checkpoints is None:
            return False
        # Clocks and signals differ between processes; one number carries both, to save a collective.
        agreed = self._agreed(2 * (self._interruption.signal or 0) + ("minutes" in passed))
        self._signal = agreed // 2
        return agreed > 0 or bool(passed - {"minutes"})

    def save(self, state: TrainState, **notes: Any) -> None:
        """Save a checkpoint; if a signal has come, wait until it is written and end the run.

        Raises:
            TrainingError: a value is not finite, or a checkpoint cannot be written.
            SystemExit: a signal has come.
        """
        self._start(state, notes)
        if self._checkpoints is not None and self._signal:
            self._checkpoints.wait()
            self._interruption.stop(self._signal, int(state.step))

    def finish(self, state: TrainState, **notes: Any) -> None:
        """Save the last checkpoint, and wait until it is written; signals no longer matter."""
        self._start(state, notes)
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _start(self, state: TrainState, notes: dict[str, Any]) -> None:
        if self._checkpoints is not None:
            self._log.sync()
            run = self._run
            common = notes_of_run(run.saved_config, run.dataset.digests, self._log.records)
            common["steps_per_epoch"] = run.loader.steps_per_epoch
            self._checkpoints.save(run.ddp.unsharded(state), common | notes)

    def sums_until(self, step: int) -> EpochSums:
        """Return the sums over the steps of an epoch until this step, at which the run continues."""
        if self._checkpoints is None or self._run.at_epoch_end(step) or step not in self._checkpoints.steps:
            return EpochSums()
        return EpochSums(self._checkpoints.notes(step)["epoch_sums"])

    def rolled_back(self, error: NotFiniteError) -> TrainState:
        """Return the state of the newest checkpoint, to go on with the batches after those that were dispatched.

        Raises:
            NotFiniteError: `error`, if the run is not to roll back, or has done so too often, or has no checkpoint.
        """
        if self._run.config.on_nan != "rollback" or self._rollbacks == MAX_ROLLBACKS or self._checkpoints is None:
            raise error
        if self._checkpoints.newest_intact() is None:
            raise error
        self._rollbacks += 1
        ddp = self._run.ddp
        restored = self._checkpoints.restore(ddp.unsharded(ddp.init()))
        line = f"{error}; back to the checkpoint of step {int(restored.step)}, on with the batches after step "
        line += f"{self.reached} ({self._rollbacks} of at most {MAX_ROLLBACKS} times)"
        if self._run.is_first:
            print(line, file=sys.stderr, flush=True)
        reached: Any = np.int32(self.reached)
        return ddp.place_state(dataclasses.replace(restored, step=reached))

    def with_last_good(self, error: TrainingError) -> TrainingError:
        """Return an error with the newest checkpoint that is intact in its message."""
        try:
            step = None if self._checkpoints is None else self._checkpoints.newest_intact()
        except MovedError as moved:  # there is no place to look for checkpoints
            return error if isinstance(error, MovedError) else moved
        if step is None:
            return TrainingError(f"{error}; there is no checkpoint yet")
        folder = self._run.config.output
        return TrainingError(f"{error}; the last good checkpoint is of step {step}; continue with --resume {folder}")


def train(
    run: Run,
    state: TrainState,
    log: RunLog,
    checkpoints: "Checkpoints | None",
    tell_stall: Callable[[str], None] | None = None,
) -> TrainState:
    """Train from `state` to the end of the last epoch; `tell_stall` is called if nothing moves in this process.

    Raises:
        TrainingError: a loss is not finite, or replicas differ; checkpoints saved before remain valid.
        SystemExit: a signal has come; a checkpoint is saved.
    """
    config, ddp = run.config, run.ddp
    started = time.perf_counter()
    if checkpoints is not None:
        checkpoints.create()
    folder = None if checkpoints is None else config.output
    stall = StallWatch(config.stall_timeout, f"; continue with --resume {folder}" if folder else "", tell_stall)
    with stall, Interruption(folder, quiet=not run.is_first) as interruption:
        saver = Saver(run, checkpoints, interruption, int(state.step), log)
        try:
            state, accuracy = train_epochs(run, state, log, saver, stall)
            if config.output is not None:
                _save_weights(run, WEIGHTS_FILE, state, log)
                if config.ema_decay is not None:
                    _save_weights(run, AVERAGED_FILE, ddp.averaged(state), log)
        except TrainingError as error:
            raise saver.with_last_good(error) from None
    log.summary(accuracy, time.perf_counter() - started, config.agreement)
    return state


def _save_weights(run: Run, name: str, state: TrainState, log: RunLog) -> None:
    values = run.ddp.values(state)  # a collective of all processes
    if run.is_first:
        with log.writing():
            save_weights(Path(run.config.output or "") / name, *values)


def train_epochs(run: Run, state: TrainState, log: RunLog, saver: Saver, stall: StallWatch) -> tuple[TrainState, float]:
    """Train for the epochs that are left, and test and save after each; return the last state and test accuracy."""
    config, ddp = run.config, run.ddp
    test_set = ddp.place(run.dataset.test)

    def tested(state: TrainState) -> dict[str, float]:
        stall.doing(f"the test after step {saver.reached}")
        return means(jax.device_get(ddp.evaluate_placed(state, test_set)))

    def one_epoch(state: TrainState, epoch: int) -> tuple[TrainState, dict[str, float]]:
        state, train_means, speed = train_epoch(run, state, epoch, log, saver, stall)
        test = tested(state)
        if not math.isfinite(test["loss"]):  # the last update comes after the last training loss
            raise NotFiniteError(f"test loss is {test['loss']} at step {int(state.step)}")
        averaged = None if config.ema_decay is None else tested(ddp.averaged(state))
        log.epoch(int(state.step), epoch + 1, train_means, test, speed, averaged)
        if saver.due(int(state.step)) and epoch + 1 < config.epochs:
            state = run.verified(state)
            saver.save(state, test_loss=test["loss"])
        return state, test

    test: dict[str, float] = {}
    state = run.verified(state)
    while True:
        try:
            if (epoch := int(state.step) // run.loader.steps_per_epoch) < config.epochs:
                state, test = one_epoch(state, epoch)
                continue
            test = test or tested(state)
            state = run.verified(state)
            saver.finish(state, test_loss=test["loss"])
            return state, test["accuracy"]
        except NotFiniteError as error:
            state, test = saver.rolled_back(error), {}


def train_epoch(
    run: Run, state: TrainState, epoch: int, log: RunLog, saver: Saver, stall: StallWatch
) -> tuple[TrainState, dict[str, float], float]:
    """Train for one epoch, or for the part of it after `state.step`.

    Returns:
        The state at the end, the means over the examples, and examples per second.
    """
    started = time.perf_counter()
    step, examples = int(state.step), 0
    in_flight, totals = InFlight(first_step=step + 1, explain=run.explain), saver.sums_until(step)

    def report(wait: bool) -> int:
        seen = 0
        for number, by_jax_name in in_flight.finished(wait):
            sums = renamed(by_jax_name, torch_name)
            size = run.loader.examples_in(number - 1)
            log.step(number, epoch + 1, step_metrics(sums), examples=size)
            totals.add(sums)
            seen += size
        return seen

    stall.doing(f"the batch of step {step + 1}")
    for batches in run.loader.epoch(epoch, start_step=step % run.loader.steps_per_epoch):
        stall.doing(f"step {step + 1}")
        state, sums = run.ddp.steps(state, batches)
        in_flight.add(sums)
        before, step = step, step + len(sums.table)
        saver.reached = step
        examples += report(wait=False)
        if run.config.verify_every and before // run.config.verify_every != step // run.config.verify_every:
            state = run.verified(state)
        if not run.at_epoch_end(step) and saver.due(step):  # at the end, the epoch is tested and logged before
            examples += report(wait=True)
            state = run.verified(state)
            saver.save(state, epoch_sums=totals.sums)
        stall.doing(f"the batch of step {step + 1}")
    stall.doing(f"step {step}")
    examples += report(wait=True)
    log.histograms(step, totals.histograms())
    return state, totals.means(), examples / (time.perf_counter() - started)
