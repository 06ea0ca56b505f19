"""Tests of a run on one rank: when one is due, what it computes, and what follows from it."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from jaxddp.errors import NotFiniteError
from jaxddp.program import asks_for, bound
from jaxddp.program.losses import asks_to_stop
from jaxddp.tracking.run_log import RunLog, by_split
from jaxddp.tracking.stopping import Stopping
from torch_ref.local_sgd import shown as mean_shown
from torch_ref.weights import arrays_of

if TYPE_CHECKING:
    from torch_ref.train_loop import Run


class Tester:
    """Test a run, and tell its schedule, its early stopping and its program what came out.

    Args:
        run: the run.
        log: log of the run.
        stopping: early stopping.
    """

    def __init__(self, run: "Run", log: RunLog, stopping: Stopping):
        self._run, self._log, self._stopping = run, log, stopping
        self._period = run.config.evaluation_period

    def begin(self, metrics: dict[str, float]) -> None:
        """Check `--best-metric` by a first test, if the run depends on it."""
        if self._run.config.judges and metrics:
            Stopping(self._run.config).tested(metrics)

    def due(self) -> bool:
        """Return whether a test is due after the last step."""
        step = self._run.state.step
        return bool(self._run.data.tests) and self._period.passed("steps", step - 1, step)

    def within_epoch(self, epoch: int) -> None:
        """Test and log between two steps of an epoch."""
        test, averaged = self._tested()
        self._log.test(self._run.state.step, epoch + 1, test, averaged)
        self._judge(test)

    def after_epoch(self, epoch: int, train: dict[str, float], speed: float) -> dict[str, float]:
        """Test if it is due, log, and call the program's `on_epoch_end`; return the metrics to judge the run by."""
        run, config, state = self._run, self._run.config, self._run.state
        if config.swa_start is not None and epoch >= config.swa_start:
            assert state.averaged is not None, "made with --swa-start"
            state.averaged.update_parameters(state.module)
        due = self.due() or self._period.passed("epochs", epoch, epoch + 1) or epoch + 1 == config.epochs
        test, averaged = self._tested() if due else ({}, None)
        self._log.epoch(state.step, epoch + 1, train, test, speed, averaged)
        shown = test or ({} if run.data.tests else train)
        if shown:
            self._judge(shown)
        self.tell("on_epoch_end", epoch, by_split(train=train, test=test, averaged=averaged or {}))
        return shown

    def average(self) -> nn.Module | None:
        """Return the module with averaged parameters, SWA's with their BatchNorm statistics; None without one."""
        run, state = self._run, self._run.state
        if state.averaged is None:
            return None
        if run.config.swa_start is not None:
            if not int(state.averaged.n_averaged):
                return None
            with torch.no_grad():
                for kept, buffer in zip(state.averaged.module.buffers(), state.module.buffers(), strict=True):
                    kept.copy_(buffer)
            update_batch_norm(run, state.averaged.module, state.step // run.loader.steps_per_epoch - 1)
        return state.averaged.module

    def _tested(self) -> tuple[dict[str, float], dict[str, float] | None]:
        run, step = self._run, self._run.state.step
        test = run.evaluate(run.state.module)
        for name in (f"{prefix}loss" for prefix in run.data.tests):
            if not math.isfinite(test.get(name, 0.0)):
                raise NotFiniteError(f"test {name} is {test[name]} at step {step}")
        average = self.average()
        return test, None if average is None else run.evaluate(average)

    def _judge(self, metrics: dict[str, float]) -> None:
        value = self._stopping.tested(metrics) if self._run.config.judges else None
        if self._run.state.plateau is not None:
            loss = self._run.data.full_name("loss")
            self._run.state.plateau.step(metrics[loss] if value is None else value)

    def tell(self, name: str, epoch: int, metrics: dict[str, float]) -> None:
        """Call `on_epoch_end` or `on_step_end`, if the program has it, which may ask for the end of the run."""
        run, function = self._run, self._run.program.get(name)
        if function is None:
            return
        given: dict[str, Any] = {}
        with mean_shown(run.state.module, run.config, run.world):
            if asks_for(function, "weights"):
                given["weights"] = arrays_of(run.state.module)
        asked = run.world.rank == 0 and asks_to_stop(name, bound(function, **given)(epoch + 1, run.state.step, metrics))
        if run.world.broadcast_object(asked):
            self._stopping.asked = name


def update_batch_norm(run: "Run", module: nn.Module, epoch: int) -> None:
    """Replace BatchNorm's running statistics by their means over an epoch's batches of all ranks, like update_bn.

    Source: torch.optim.swa_utils.update_bn
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over the batches
    module.train()
    with torch.no_grad():
        for micro_batches in run.loader.epoch(epoch):
            for batch in micro_batches:
                if all(map(len, batch.values())):
                    run.loss_fn(module, batch)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            synchronized = isinstance(layer, nn.SyncBatchNorm)
            _join_statistics(run, layer, synchronized)


def _join_statistics(run: "Run", layer: Any, synchronized: bool) -> None:
    """Average a layer's statistics over the ranks, by their numbers of batches; those of SyncBatchNorm are equal."""
    own = layer.num_batches_tracked.clone()
    total = run.world.all_reduce(own.clone())
    for statistic in (layer.running_mean, layer.running_var):
        statistic.copy_(run.world.all_reduce(statistic * (own / total).to(statistic.dtype)))
    layer.num_batches_tracked.copy_(own if synchronized else total)
