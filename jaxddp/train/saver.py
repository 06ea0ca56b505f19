"""Checkpoints of a run: when one is due, what is saved with the state, and which one to go back to."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxddp.distributed.agreement import Agreement
from jaxddp.errors import MovedError, NotFiniteError, TrainingError, tell
from jaxddp.nn.torch_weights import save_weights
from jaxddp.signals import Interruption
from jaxddp.state import TrainState
from jaxddp.step.metrics import EpochSums
from jaxddp.tracking.resumed import notes_of_run
from jaxddp.tracking.run_log import RunLog
from jaxddp.tracking.stopping import Stopping
from jaxddp.train.parts import Run

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

BEST_FILE = "model_best.safetensors"
MAX_ROLLBACKS = 3  # in one process


def notes_at(checkpoints: "Checkpoints | None", step: int) -> dict[str, Any]:
    """Return the notes of the checkpoint of a step; none if there is no such checkpoint."""
    return checkpoints.notes(step) if checkpoints is not None and step in checkpoints.steps else {}


class Saver:
    """Save the checkpoints of a run: decide when one is due, and add notes to the state.

    Args:
        run: the run.
        checkpoints: where to save; None: nowhere.
        interruption: signals, after which a checkpoint is due and the run stops.
        start_step: step from which the run continues.
        log: log of the run, whose records a checkpoint must not outlive.
        stopping: early stopping, whose count a checkpoint notes.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: "Checkpoints | None",
        interruption: Interruption,
        start_step: int,
        log: RunLog,
        stopping: Stopping,
    ):
        self._run = run
        self._log, self._stopping = log, stopping
        self._sums = EpochSums()
        self._checkpoints = checkpoints
        self._interruption = interruption
        self._agreed = Agreement(run.ddp.replicas)
        self._signal = 0  # on which all processes agree
        self._period = run.config.checkpoint_period
        self._started = time.monotonic()
        self._seen = self._position(start_step)
        self._rollbacks = 0
        self._reached = start_step

    def _position(self, step: int) -> dict[str, float]:
        minutes = (time.monotonic() - self._started) / 60
        return {"epochs": step // self._run.loader.steps_per_epoch, "steps": step, "minutes": minutes}

    def dispatched(self, step: int) -> None:
        """Note the number of the last step that was dispatched; before the first, a signal ends the process at once."""
        self._reached = step
        self._interruption.listen()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step; call it once per step."""
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
            common = notes_of_run(run.saved_config, run.data.digests, self._log.records)
            common |= {"steps_per_epoch": run.loader.steps_per_epoch, "stopping": self._stopping.notes}
            common |= run.data.position(int(state.step))
            if not run.at_epoch_end(int(state.step)):
                common["epoch_sums"] = self._sums.sums
            is_best = self._checkpoints.is_best(notes)
            self._checkpoints.save(run.ddp.unsharded(state), common | notes)
            if is_best:
                self.save_weights(BEST_FILE, run.weights(state))

    def save_weights(self, name: str, weights: Mapping[str, np.ndarray]) -> None:
        """Write weights into the run folder, in the process that does so."""
        if self._run.is_first:
            with self._log.writing():
                save_weights(Path(self._run.config.output or "") / name, weights)

    def sums_until(self, step: int) -> EpochSums:
        """Return the sums over the steps of an epoch until this step, at which the run continues; add further ones."""
        within = not self._run.at_epoch_end(step)
        self._sums = EpochSums(notes_at(self._checkpoints, step).get("epoch_sums") if within else None)
        return self._sums

    def rolled_back(self, error: NotFiniteError) -> TrainState:
        """Return the state of the newest checkpoint, to continue with the batches after those that were dispatched.

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
        line += f"{self._reached} ({self._rollbacks} of at most {MAX_ROLLBACKS} times)"
        if self._run.is_first:
            tell(line)
        reached: Any = np.int32(self._reached)
        return ddp.place_state(dataclasses.replace(restored, step=reached))

    def with_last_good(self, error: TrainingError) -> TrainingError:
        """Return an error with NaN in a program's data, and the newest checkpoint that is intact, in its message."""
        if isinstance(error, NotFiniteError) and self._run.program.path and (place := self._run.data.place_of_nan()):
            error = NotFiniteError(f"{error}; {place}")
        try:
            step = None if self._checkpoints is None else self._checkpoints.newest_intact()
        except MovedError as moved:  # there is no place to look for checkpoints
            return error if isinstance(error, MovedError) else moved
        if step is None:
            return TrainingError(f"{error}; there is no checkpoint yet")
        folder = self._run.config.output
        return TrainingError(f"{error}; the last good checkpoint is of step {step}; continue with --resume {folder}")
