"""`python -m torch_ref.train`: the training of jaxddp.train, by torch's own DistributedDataParallel.

python -m torch_ref.train --model mlp --devices 4 --output runs/mlp
torchrun --nproc-per-node 4 -m torch_ref.train --model mlp --output runs/mlp
"""

import contextlib
import copy
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp import cli
from jaxddp.data import datasets
from jaxddp.data.sampler import shard_table
from jaxddp.errors import InputError, TrainingError
from jaxddp.tracking.gradient_metrics import check_finite, explained, histograms
from jaxddp.tracking.resumed import check_not_done, check_same_epochs
from jaxddp.tracking.run_folder import check_same_data, claim_output
from jaxddp.tracking.run_log import RunLog, frozen_notes, run_title
from torch_ref import models, optim
from torch_ref.amp import autocast, grad_scaler
from torch_ref.checkpoint import checkpoint_size, load_checkpoint, of_others, save_checkpoint
from torch_ref.comm_hooks import register
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import wrap
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World
from torch_ref.evaluate import evaluate
from torch_ref.gradient_log import GradientLog
from torch_ref.join import catch_up, join
from torch_ref.launch import launch
from torch_ref.loader import Loader, epoch_indices, evaluation_batches
from torch_ref.local_sgd import shown
from torch_ref.losses import Batch, LossFunction, Sums, cross_entropy
from torch_ref.metrics import all_reduce_sums, means, step_metrics, total
from torch_ref.state import TrainState, averaged_model
from torch_ref.step import train_step
from torch_ref.verify import verify_replicas
from torch_ref.weights import load_weights, save_weights
from torch_ref.zero import consolidate

CHECKPOINT_FILE = "checkpoint.pt"
JAXDDP_CHECKPOINTS = "checkpoints"  # folder of jaxddp.train's checkpoints
WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"
REPORT_EVERY = 50  # optimizer steps between two reductions of the metrics


def main(config: TorchConfig) -> None:
    """Train as `config` asks, on every rank, and print, log and save the results."""
    if config.resume is not None:
        config = dataclasses.replace(config, output=config.resume)
    check_devices(config)
    if config.print_shards:
        print_shards(config)
    else:
        launch(train, config)


def train(world: World, config: TorchConfig) -> None:
    """Train on one rank; only rank 0 prints, logs and saves.

    Raises:
        InputError: the parts of the run do not fit each other, or the folder belongs to another run.
        TrainingError: a loss is not finite, or replicas differ; checkpoints saved before remain valid.
    """
    run = build(world, config)
    first = world.rank == 0
    with contextlib.ExitStack() as resources:
        open_output(run, resources)
        log = resources.enter_context(
            RunLog(
                dataclasses.replace(config, resume=None, devices=num_replicas(config)),
                Path(config.output) if first and config.output is not None else None,
                title=run_title(config, num_replicas(config), _framework(run)),
                notes=frozen_notes(name for name, p in run.state.module.named_parameters() if not p.requires_grad),
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=run.state.step if config.resume else None,
                digests=run.dataset.digests if first and config.output is not None else None,
                quiet=not first,
            )
        )
        try:
            train_epochs(run, log)
        except TrainingError as error:
            raise TrainingError(f"{error}; {_last_good(config)}") from None


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

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Compute means over the test set."""
        with shown(module, self.config, self.world):
            return evaluate(module, self.test_batches, self.world, self.loss_fn)


def build(world: World, config: TorchConfig) -> Run:
    """Build the parts of a run, before its first step.

    Raises:
        InputError: the parts do not fit each other.
    """
    dataset = datasets.load(config)
    replicas = num_replicas(config)
    ranks = range(replicas) if config.strategy == "single" else [world.rank]
    loader = Loader(dataset.train, config, replicas, ranks, world.device)
    module = models.build(config, dataset).to(world.device)
    if config.sync_batch_norm and world.world_size > 1:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, world.group)
    else:
        _check_batch_norm(config, loader, module)
    config.check_square(sum(p.numel() for p in module.parameters() if p.requires_grad))
    if config.weights is not None and not _has_checkpoint(config):
        load_weights(config.weights, module)
    total_steps = config.total_steps(loader.steps_per_epoch)
    optimizer, scheduler = optim.from_config(module.parameters(), config.with_scaled_lr(replicas), total_steps, world)
    averaged, scaler = averaged_model(module, config.ema_decay), grad_scaler(config, world.device)
    state = TrainState(module, optimizer, scheduler, averaged=averaged, scaler=scaler)
    replica = wrap(module, world, config.strategy, config.buffers)  # before resume: DDP sends rank 0's values
    test_batches = evaluation_batches(dataset.test, config, world)
    gradient_log = GradientLog(module, world, config)
    loss_fn = autocast(cross_entropy, config.amp)
    return Run(config, world, dataset, loader, test_batches, replica, state, loss_fn, gradient_log)


def open_output(run: Run, resources: contextlib.ExitStack) -> None:
    """On rank 0, own the run folder until `resources` close; with --resume, load its checkpoint on every rank.

    Raises:
        InputError: the folder belongs to another run, or its checkpoint to another model or other data.
    """
    config, world, state = run.config, run.world, run.state
    if config.output is not None and world.rank == 0:
        space = checkpoint_size(state)
        folder = resources.enter_context(claim_output(config.output, config.resume is not None, space))
        if config.resume is not None:
            check_same_data(folder, run.dataset.digests)
            check_same_epochs(folder, run.loader.steps_per_epoch)
    if config.resume is not None:
        world.barrier()  # until rank 0 owns the folder, another run may replace the checkpoint
        resume(Path(config.resume), state, world.rank)
        check_not_done(config.resume, state.step, run.loader.steps_per_epoch, config.epochs)
    if isinstance(run.model, DistributedDataParallel):
        look = [run.gradient_log.look] if config.detect_anomaly else []
        register(run.model, config, world, look, state.step)


def resume(folder: Path, state: TrainState, rank: int) -> None:
    """Load the checkpoint in `folder` into `state`; a run that ended before its first checkpoint starts again."""
    if (folder / JAXDDP_CHECKPOINTS).exists():
        raise InputError(f"--resume {folder}: holds a run of jaxddp.train; resume it with jaxddp.train")
    if (folder / CHECKPOINT_FILE).exists():
        load_checkpoint(folder / CHECKPOINT_FILE, state, rank)


def _has_checkpoint(config: TorchConfig) -> bool:
    return config.resume is not None and (Path(config.resume) / CHECKPOINT_FILE).exists()


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
            keep(run)
    keep(run)
    with shown(state.module, config, run.world):
        if config.output is not None and run.world.rank == 0:
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


def keep(run: Run) -> None:
    """Verify the replicas and, if there is a run folder, write a checkpoint."""
    verify(run)
    if run.config.output is None:
        return
    consolidate(run.state.optimizer)
    ranks_differ = run.config.buffers == "local" or run.config.start_local_sgd_iter is not None
    others = of_others(run.state, run.world) if ranks_differ else []
    if run.world.rank == 0:
        save_checkpoint(Path(run.config.output) / CHECKPOINT_FILE, run.state, others)
    run.world.barrier()  # other ranks may look for the checkpoint next


def verify(run: Run) -> None:
    """Check that all ranks hold equal parameters, unless local SGD lets them differ."""
    if run.config.start_local_sgd_iter is None:
        verify_replicas(run.state.module, run.world, run.state.step)


def print_shards(config: TorchConfig) -> None:
    """Print the examples of each replica in each step of the first epoch."""
    size, replicas = len(datasets.load(config).train["y"]), num_replicas(config)
    indices = epoch_indices(size, config, replicas)
    print(shard_table(indices, config.per_replica_batch_size(replicas), size))


def _framework(run: Run) -> str:
    if run.config.strategy == "single":
        return f"torch, one process on {run.world.device.type}"
    way = "torch DDP" if run.config.strategy == "ddp" else "torch, averaged by hand"
    return f"{way}, {torch.distributed.get_backend(run.world.group)}, world size {run.world.world_size}"


def _check_batch_norm(config: TorchConfig, loader: Loader, module: nn.Module) -> None:
    """Raise `InputError` before training if BatchNorm will meet a micro-batch with one value per channel."""
    batch = loader.smallest_micro_batch()
    try:
        with torch.no_grad():
            copy.deepcopy(module)(batch["x"])
    except ValueError as error:
        raise InputError(
            f"--global-batch-size {config.global_batch_size}: leaves a micro-batch of {len(batch['x'])} on a replica, "
            f"where BatchNorm cannot train; choose another size{'' if config.join else ', or --drop-last-batch'}"
        ) from error


def _last_good(config: TorchConfig) -> str:
    if config.output is None or not (Path(config.output) / CHECKPOINT_FILE).exists():
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {config.output}/{CHECKPOINT_FILE}; continue with --resume {config.output}"


if __name__ == "__main__":
    cli.run(main, TorchConfig, "python -m torch_ref.train")
