"""Tests of a run: when one is due, what it computes, and what follows from it."""

import math
from typing import Any

import jax
from flax import nnx

from jaxddp.distributed.agreement import Agreement
from jaxddp.distributed.stall import StallWatch
from jaxddp.errors import NotFiniteError
from jaxddp.nn.functional import Functional
from jaxddp.program import asks_for, bound
from jaxddp.program.losses import asks_to_stop
from jaxddp.state import TrainState
from jaxddp.step.batch_statistics import LAYERS
from jaxddp.step.metrics import means
from jaxddp.tracking.run_log import RunLog, by_split
from jaxddp.tracking.stopping import Stopping
from jaxddp.train.parts import Run


class Tester:
    """Test a run, and tell its schedule, its early stopping and its program what came out.

    Args:
        run: the run.
        log: log of the run.
        stall: watch over the run.
        stopping: early stopping.
        start_step: step from which the run continues.
    """

    def __init__(self, run: Run, log: RunLog, stall: StallWatch, stopping: Stopping, start_step: int):
        self._run, self._log, self._stall, self._stopping = run, log, stall, stopping
        stall.doing(f"the reading of {run.program.name}'s test examples")
        self._test_sets = {prefix: run.ddp.place(source) for prefix, source in run.data.tests.items()}
        self._period = run.config.evaluation_period
        self._seen, self._due = start_step, False
        self._agreed = Agreement(run.ddp.replicas, delay=0)

    def begin(self, state: TrainState) -> None:
        """Check `--best-metric` before the first step, if the run depends on it."""
        config = self._run.config
        if config.judges and config.best_metric != "loss" and self._test_sets:
            Stopping(config).tested(self.metrics(state))

    def due(self, step: int) -> bool:
        """Return whether a test is due after this step, within an epoch or at its end; call it once per dispatch."""
        before, self._seen = self._seen, step
        self._due = bool(self._test_sets) and self._period.passed("steps", before, step)
        return self._due

    def metrics(self, state: TrainState) -> dict[str, float]:
        """Compute means over each test set; none, if the program has no test set.

        Raises:
            NotFiniteError: the loss is not finite; the last update comes after the last training loss.
        """
        metrics: dict[str, float] = {}
        for prefix, test_set in self._test_sets.items():
            self._stall.doing(f"the test after step {int(state.step)}")
            of_set = means(jax.device_get(self._run.ddp.evaluate_placed(state, test_set)))
            if self._run.program.get("jax_loss") is None:
                del of_set["loss"]
            if not math.isfinite(of_set.get("loss", 0.0)):
                raise NotFiniteError(f"test {prefix}loss is {of_set['loss']} at step {int(state.step)}")
            metrics |= {prefix + name: value for name, value in of_set.items()}
        return metrics

    def averaged(self, state: TrainState) -> TrainState | None:
        """Return the state with averaged parameters, SWA's with their BatchNorm statistics; None without an average."""
        run, step = self._run, int(state.step)
        if run.config.ema_decay is not None:
            return run.ddp.averaged(state)
        if run.config.swa_start is None or not int(state.averaged.n_averaged):
            return None
        average = run.ddp.averaged(state)
        if _has_batch_norm(run.ddp.functional):
            self._stall.doing(f"BatchNorm's statistics after step {step}")
            average = run.ddp.update_bn(average, run.loader.epoch(step // run.loader.steps_per_epoch - 1))
        return average

    def within_epoch(self, state: TrainState, epoch: int) -> tuple[TrainState, dict[str, float]]:
        """Test and log between two steps of an epoch."""
        test, averaged = self._tested(state)
        self._log.test(int(state.step), epoch + 1, test, averaged)
        return self._judged(state, test), test

    def after_epoch(
        self, state: TrainState, epoch: int, train: dict[str, float], speed: float
    ) -> tuple[TrainState, dict[str, float]]:
        """Test if it is due, log, and call the program's `on_epoch_end`; return the metrics to judge the run by."""
        run, config = self._run, self._run.config
        if config.swa_start is not None and epoch >= config.swa_start:
            state = run.ddp.update_average(state)
        due = self._due or self._period.passed("epochs", epoch, epoch + 1) or epoch + 1 == config.epochs
        test, averaged = self._tested(state) if due else ({}, None)
        self._log.epoch(int(state.step), epoch + 1, train, test, speed, averaged)
        shown = test or ({} if self._test_sets else train)
        if shown:
            state = self._judged(state, shown)
        self.tell("on_epoch_end", state, epoch, by_split(train=train, test=test, averaged=averaged or {}))
        return state, shown

    def _tested(self, state: TrainState) -> tuple[dict[str, float], dict[str, float] | None]:
        test, average = self.metrics(state), self.averaged(state)
        return test, None if average is None else self.metrics(average)

    def _judged(self, state: TrainState, metrics: dict[str, float]) -> TrainState:
        value = self._stopping.tested(metrics) if self._run.config.judges else None
        if self._run.ddp.rates(state):  # of a plateau, which the program's optimizer may have, too
            loss = self._run.data.full_name("loss")
            state = self._run.ddp.observed(state, metrics[loss] if value is None else value)
        return state

    def tell(self, name: str, state: TrainState, epoch: int, metrics: dict[str, float]) -> None:
        """Call `on_epoch_end` or `on_step_end`, if the program has it, which may ask for the end of the run."""
        if (function := self._run.program.get(name)) is None:
            return
        given: dict[str, Any] = {}
        if asks_for(function, "weights"):
            given["weights"] = self._run.weights(state)
        stop = False
        if self._run.is_first:
            stop = asks_to_stop(name, bound(function, **given)(epoch + 1, int(state.step), metrics))
        if self._agreed(int(stop)):
            self._stopping.asked = name


def _has_batch_norm(functional: Any) -> bool:
    if not isinstance(functional, Functional):
        return False
    model = functional.module(functional.params, functional.buffers)
    return any(isinstance(layer, LAYERS) for _, layer in nnx.iter_modules(model))
