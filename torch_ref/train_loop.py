"""Training loop of one rank: epochs of optimizer steps, their tests and their checkpoints."""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from jaxddp.data import datasets
from jaxddp.errors import TrainingError
from jaxddp.tracking.gradient_metrics import check_finite, explained, histograms
from jaxddp.tracking.resumed import notes_of_run
from jaxddp.tracking.run_log import RunLog
from torch_ref.checkpoint import CHECKPOINT_FILE, of_others, save_checkpoint
from torch_ref.config import TorchConfig
from torch_ref.devices import num_replicas
from torch_ref.distributed import World
from torch_ref.evaluate import evaluate
from torch_ref.gradient_log import GradientLog
from torch_ref.join import catch_up, join
from torch_ref.loader import Loader
from torch_ref.local_sgd import shown
from torch_ref.losses import Batch, LossFunction, Sums
from torch_ref.metrics import all_reduce_sums, means, step_metrics, total
from torch_ref.state import TrainState
from torch_ref.step import train_step
from torch_ref.verify import verify_replicas
from torch_ref.weights import save_weights
from torch_ref.zero import consolidate

WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"
REPORT_EVERY = 50  # optimizer steps between two reductions of the metrics


@dataclass(frozen=True)
class Run:
    """Parts of a run on one rank, which have been checked to fit each other; nothing has been written yet."""

    config: TorchConfig
    world: World
    dataset: datasets.Dataset
    loader: Loader
    test_batches: list[Batch]
    model: nn.Module
    """Replica, with the module wrapped by DDP, for instance."""
    state: TrainState
    """State, with the bare module."""
    loss_fn: LossFunction
    """Loss, under autocast if `config` asks for it."""
    gradient_log: GradientLog

    @property
    def saved_config(self) -> TorchConfig:
        """Configuration as the run folder keeps it, with the number of devices."""
        return dataclasses.replace(self.config, resume=None, devices=num_replicas(self.config))

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Compute means over the test set."""
        with shown(module, self.config, self.world):
            return evaluate(module, self.test_batches, self.world, self.loss_fn)


def train_epochs(run: Run, log: RunLog) -> None:
    """Train from `run.state` to the end of the last epoch."""
    config, state, steps_per_epoch = run.config, run.state, run.loader.steps_per_epoch
    started = time.perf_counter()
    test = run.evaluate(state.module)
    for epoch in range(state.step // steps_per_epoch, config.epochs):
        train_means, speed = train_epoch(run, epoch, log)
        test = run.evaluate(state.module)
        if not math.isfinite(test["loss"]):
            raise TrainingError(f"test loss is {test['loss']} at step {state.step}")
        averaged = None if state.averaged is None else run.evaluate(state.averaged.module)
        log.epoch(state.step, epoch + 1, train_means, test, speed, averaged)
        if config.checkpoint_period.passed("epochs", epoch, epoch + 1):
            keep(run, log)
    keep(run, log)
    with shown(state.module, config, run.world):
        if config.output is not None and run.world.rank == 0:
            with log.writing():
                save_weights(Path(config.output) / WEIGHTS_FILE, state.module)
                if state.averaged is not None:
                    save_weights(Path(config.output) / AVERAGED_FILE, state.averaged.module)
    log.summary(test["accuracy"], time.perf_counter() - started, config.agreement)


def train_epoch(run: Run, epoch: int, log: RunLog) -> tuple[dict[str, float], float]:
    """Train for one epoch, or for the part of it after `run.state.step`.

    Returns:
        The means over the examples, and examples per second.
    """
    config, state, loader = run.config, run.state, run.loader
    started, first = time.perf_counter(), state.step
    waiting: list[Sums] = []
    reported: list[dict[str, float]] = []
    run.model.train()
    with join(run.model, config):
        for micro_batches in loader.epoch(epoch, start_step=state.step % loader.steps_per_epoch):
            sums = train_step(
                run.model,
                state.optimizer,
                state.scheduler,
                micro_batches,
                run.world,
                loss_normalization=config.loss_normalization,
                clip_grad_norm=config.clip_grad_norm,
                buffers=config.buffers,
                step=state.step,
                scaler=state.scaler,
                loss_fn=run.loss_fn,
                gradient_log=run.gradient_log,
            )
            state.advance(skipped=bool(sums.get("skipped", False)))
            waiting.append(sums)
            if config.join:  # ranks without batches take part in DDP's collectives only
                continue
            if len(waiting) == REPORT_EVERY:
                reported += report(run, epoch, waiting, log)
                waiting = []
            if config.verify_every and state.step % config.verify_every == 0:
                verify(run)
    if config.join:
        catch_up(state, waiting, run.world)
    reported += report(run, epoch, waiting, log)
    examples = sum(map(loader.examples_in, range(first, state.step)))
    of_epoch = total(reported)
    log.histograms(state.step, histograms(of_epoch))
    skipped = {name: value for name, value in of_epoch.items() if name == "skipped"}
    return means(of_epoch) | skipped, examples / (time.perf_counter() - started)


def report(run: Run, epoch: int, steps: list[Sums], log: RunLog) -> list[dict[str, float]]:
    """Reduce, check and log the sums of several steps at once, so that no step waits for them.

    Raises:
        TrainingError: in a step that was not skipped, a loss or a checked gradient is not finite; or the loss scale
            has fallen to 0. It is raised on every rank.
    """
    reduced = all_reduce_sums(steps, run.world)
    learning = [name for name, parameter in run.state.module.named_parameters() if parameter.requires_grad]
    for step, sums in enumerate(reduced, start=run.state.step - len(steps) + 1):
        check_finite(sums, step, explained(sums, learning) if run.config.detect_anomaly else None)
        log.step(step, epoch + 1, step_metrics(sums), run.loader.examples_in(step - 1))
    return reduced


def keep(run: Run, log: RunLog) -> None:
    """Verify the replicas and, if there is a run folder, write the log's records and a checkpoint to the disk."""
    verify(run)
    if run.config.output is None:
        return
    consolidate(run.state.optimizer)
    ranks_differ = run.config.buffers == "local" or run.config.start_local_sgd_iter is not None
    others = of_others(run.state, run.world) if ranks_differ else []
    if run.world.rank == 0:
        log.sync()
        notes = notes_of_run(run.saved_config, run.dataset.digests, log.records)
        with log.writing():
            save_checkpoint(Path(run.config.output) / CHECKPOINT_FILE, run.state, others, notes)
    run.world.barrier()  # other ranks may look for the checkpoint next


def verify(run: Run) -> None:
    """Check that all ranks hold equal parameters, unless local SGD lets them differ."""
    if run.config.start_local_sgd_iter is None:
        verify_replicas(run.state.module, run.world, run.state.step)


def last_good(config: TorchConfig) -> str:
    """Describe the newest checkpoint, after an error."""
    if config.output is None or not (Path(config.output) / CHECKPOINT_FILE).exists():
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {config.output}/{CHECKPOINT_FILE}; continue with --resume {config.output}"
