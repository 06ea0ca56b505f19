"""Training loop of one rank: epochs of optimizer steps, their tests and their checkpoints."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jaxddp.data.run_data import RunData
from jaxddp.program import Program
from jaxddp.tracking.gradient_metrics import check_finite, explained, histograms
from jaxddp.tracking.resumed import notes_of_run
from jaxddp.tracking.run_log import RunLog
from jaxddp.tracking.stopping import Stopping, is_better
from jaxddp.tracking.throughput import Throughput
from torch_ref.checkpoint import CHECKPOINT_FILE, of_others, save_checkpoint
from torch_ref.config import TorchTrainerConfig
from torch_ref.data_parallel import loss_within
from torch_ref.devices import num_replicas
from torch_ref.distributed import World
from torch_ref.evaluate import evaluate
from torch_ref.gradient_log import GradientLog
from torch_ref.join import catch_up, join
from torch_ref.loader import Loader
from torch_ref.local_sgd import shown
from torch_ref.losses import Batch, LossFunction, Sums
from torch_ref.metrics import all_reduce_sums, means, step_metrics, total
from torch_ref.program import count_of
from torch_ref.program_step import ProgramStep
from torch_ref.state import TrainState
from torch_ref.step import train_step
from torch_ref.tester import Tester
from torch_ref.verify import verify_replicas
from torch_ref.weights import save_weights
from torch_ref.zero import consolidate

WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"
BEST_FILE = "model_best.safetensors"
REPORT_EVERY = 50  # optimizer steps between two reductions of the metrics, at most
REPORT_SECONDS = 1.0  # between two, if a step takes less


@dataclass(frozen=True)
class Run:
    """Parts of a run on one rank, which have been checked to fit each other; nothing has been written yet."""

    config: TorchTrainerConfig
    program: Program
    world: World
    data: RunData
    loader: Loader
    test_batches: Mapping[str, Iterable[Batch]]
    """Batches of each test set, by the beginning of its metrics' names."""
    model: nn.Module
    """Replica, with the module wrapped by DDP, for instance."""
    state: TrainState
    """State, with the bare module."""
    loss_fn: LossFunction
    """Loss of the module, under autocast if `config` asks for it."""
    test_loss: LossFunction
    """Loss with the program's metrics, likewise."""
    gradient_log: GradientLog
    step: ProgramStep | None = None
    """The program's step; None: `torch_ref.step.train_step`."""
    throughput: Throughput = field(default_factory=Throughput)
    lines: list[str] = field(default_factory=list)
    """Lines below the title, on what --weights-partial leaves out."""

    @property
    def saved_config(self) -> TorchTrainerConfig:
        """Configuration as the run folder keeps it, with the number of devices."""
        return dataclasses.replace(self.config, resume=None, devices=num_replicas(self.config))

    def memory(self) -> int | None:
        """Return the bytes that tensors take on this rank's GPU; None on a CPU."""
        device = self.world.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    def peak_memory(self) -> int | None:
        """Return the most bytes that tensors took on this rank's GPU; None on a CPU."""
        device = self.world.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Compute means over each test set; none, if the program has no test set."""
        metrics: dict[str, float] = {}
        for prefix, batches in self.test_batches.items():
            with shown(module, self.config, self.world):
                of_set = evaluate(module, batches, self.world, self.test_loss)
            if self.program.get("torch_loss") is None:
                del of_set["loss"]
            metrics |= {prefix + name: value for name, value in of_set.items()}
        return metrics


def train_epochs(run: Run, log: RunLog, notes: Mapping[str, Any] | None = None) -> None:
    """Train from `run.state` to the end of the last epoch; `notes` are those of the checkpoint it comes from."""
    config, state, steps_per_epoch = run.config, run.state, run.loader.steps_per_epoch
    started = time.perf_counter()
    stopping = Stopping(config, notes, run.data.judged)
    tester, best = Tester(run, log, stopping), (notes or {}).get("best")
    metrics = run.evaluate(state.module)
    tester.begin(metrics)
    for epoch in range(state.step // steps_per_epoch, config.epochs):
        if stopping.reason is not None:
            break
        train_means, speed = train_epoch(run, epoch, log, tester, stopping)
        if state.step % steps_per_epoch:  # stopped early
            metrics = run.evaluate(state.module)
            break
        metrics = tester.after_epoch(epoch, train_means, speed)
        if config.checkpoint_period.passed("epochs", epoch, epoch + 1):
            best = keep(run, log, stopping, best, metrics)
    metrics = metrics or run.evaluate(state.module)
    keep(run, log, stopping, best, metrics)
    average = tester.average()
    with shown(state.module, config, run.world):
        if config.output is not None and run.world.rank == 0:
            with log.writing():
                save_weights(Path(config.output) / WEIGHTS_FILE, state.module)
                if average is not None:
                    save_weights(Path(config.output) / AVERAGED_FILE, average)
    ending = *filter(None, [stopping.reason]), config.agreement
    lines = run.throughput.lines(run.peak_memory())
    log.summary(metrics, time.perf_counter() - started, *ending, split=run.data.judged, speed=lines)


def train_epoch(
    run: Run, epoch: int, log: RunLog, tester: Tester, stopping: Stopping
) -> tuple[dict[str, float], float]:
    """Train for one epoch, or for the part of it after `run.state.step` and before an early stop.

    Returns:
        The means over the examples, and examples per second.
    """
    config, state, loader = run.config, run.state, run.loader
    first, speed = state.step, run.throughput
    speed.begin()
    waiting: list[Sums] = []
    reported: list[dict[str, float]] = []
    due, begun = 1, time.perf_counter()
    run.model.train()
    with join(run.model, config):
        for micro_batches in speed.waited_for(loader.epoch(epoch, start_step=state.step % loader.steps_per_epoch)):
            sums = take_step(run, micro_batches) if run.step is None else run.step(micro_batches[0])
            state.advance(skipped=bool(sums.get("skipped", False)))
            waiting.append(sums)
            if config.join:  # ranks without batches take part in DDP's collectives only
                continue
            test_due = tester.due() and state.step % loader.steps_per_epoch != 0
            callback_due = run.program.get("on_step_end") is not None and state.step % config.callback_every == 0
            if len(waiting) >= due or test_due or callback_due:
                reported += report(run, epoch, waiting, log)
                due = steps_per_report((time.perf_counter() - begun) / len(waiting), run.world)
                waiting, begun = [], time.perf_counter()
            if config.verify_every and state.step % config.verify_every == 0:
                verify(run)
            if callback_due:
                with speed.paused():
                    tester.tell("on_step_end", epoch, step_metrics(reported[-1]))
            if test_due:
                with speed.paused():
                    tester.within_epoch(epoch)
                run.model.train()
            if stopping.reason is not None:
                break
    if config.join:
        catch_up(state, waiting, run.world)
    reported += report(run, epoch, waiting, log)
    examples = sum(map(loader.examples_in, range(first, state.step)))
    of_epoch = total(reported)
    log.histograms(state.step, histograms(of_epoch))
    skipped = {name: value for name, value in of_epoch.items() if name == "skipped"}
    return means(of_epoch) | skipped, speed.end(examples)


def take_step(run: Run, micro_batches: list[Batch]) -> Sums:
    """Take an optimizer step with the program's loss."""
    config, state = run.config, run.state
    return train_step(
        run.model,
        state.optimizer,
        state.scheduler,
        micro_batches,
        run.world,
        loss_normalization=config.loss_normalization,
        clip_grad_norm=config.clip_grad_norm,
        clip_grad_value=config.clip_grad_value,
        buffers=config.buffers,
        step=state.step,
        scaler=state.scaler,
        loss_fn=loss_within,
        count_fn=count_of(run.loss_fn, state.module),
        gradient_log=run.gradient_log,
        log_steps=not config.join,  # where ranks without examples report nothing
    )


def report(run: Run, epoch: int, steps: list[Sums], log: RunLog) -> list[dict[str, float]]:
    """Reduce, check and log the sums of several steps at once, so that no step waits for them.

    Raises:
        TrainingError: in a step that was not skipped, a loss or a checked gradient is not finite; or the loss scale
            has fallen to 0. It is raised on every rank.
    """
    reduced = all_reduce_sums(steps, run.world)
    learning = [name for name, parameter in run.state.module.named_parameters() if parameter.requires_grad]
    for step, sums in enumerate(reduced, start=run.state.step - len(steps) + 1):
        anomaly = explained(sums, learning) if run.config.detect_anomaly else None
        check_finite(sums, step, anomaly, run.loader.batch_of)
        log.step(step, epoch + 1, step_metrics(sums), run.loader.examples_in(step - 1))
    return reduced


def steps_per_report(seconds: float, world: World) -> int:
    """Return the steps until the next report, the same on all ranks, from the time that a step takes on this one.

    >>> [steps_per_report(seconds, World()) for seconds in (0.001, 0.1, 5.0)]
    [50, 10, 1]
    """
    slowest = float(world.all_reduce(torch.tensor(seconds, device=world.device), "max"))
    return max(1, min(REPORT_EVERY, int(REPORT_SECONDS / slowest + 0.01)))


def keep(run: Run, log: RunLog, stopping: Stopping, best: float | None, metrics: Mapping[str, float]) -> float | None:
    """Verify the replicas and, if there is a run folder, write the log's records and a checkpoint to the disk.

    Args:
        best: the best `--best-metric` of the checkpoints before; None: there is none.
        metrics: those of the test after this step; none if it was not tested.

    Returns:
        The best metric now, whose weights `--keep-best` writes.
    """
    verify(run)
    if run.config.output is None:
        return best
    value = metrics.get(run.config.best_metric, math.nan)
    if run.config.keep_best and is_better(value, best, run.config.best_mode):
        best = value
        with shown(run.state.module, run.config, run.world):
            if run.world.rank == 0:
                with log.writing():
                    save_weights(Path(run.config.output) / BEST_FILE, run.state.module)
    consolidate(run.state.optimizer)
    ranks_differ = run.config.buffers == "local" or run.config.start_local_sgd_iter is not None
    others = of_others(run.state, run.world) if ranks_differ else []
    if run.world.rank == 0:
        log.sync()
        notes = notes_of_run(run.saved_config, run.data.digests, log.records) | {"stopping": stopping.notes}
        notes |= {"best": best, **run.data.position(run.state.step)}
        with log.writing():
            save_checkpoint(Path(run.config.output) / CHECKPOINT_FILE, run.state, others, notes)
    run.world.barrier()  # other ranks may look for the checkpoint next
    return best


def verify(run: Run) -> None:
    """Check that all ranks hold equal parameters, unless local SGD lets them differ."""
    if run.config.start_local_sgd_iter is None:
        verify_replicas(run.state.module, run.world, run.state.step)


def last_good(config: TorchTrainerConfig) -> str:
    """Describe the newest checkpoint, after an error."""
    if config.output is None or not (Path(config.output) / CHECKPOINT_FILE).exists():
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {config.output}/{CHECKPOINT_FILE}; continue with --resume {config.output}"
