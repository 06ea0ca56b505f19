"""`python -m torch_ref.train`: the training of jaxddp.train, by torch's own DistributedDataParallel.

python -m torch_ref.train --model mlp --devices 4 --output runs/mlp
torchrun --nproc-per-node 4 -m torch_ref.train --model mlp --output runs/mlp
"""

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

from jaxddp import cli
from jaxddp.config.ulimits import LEAST_FOR_TORCH, check_address_space

if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        check_address_space(LEAST_FOR_TORCH)  # before torch is imported

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.data import datasets
from jaxddp.data.sampler import shard_table
from jaxddp.errors import InputError, MovedError, TrainingError
from jaxddp.tracking.resumed import check_not_done, check_same_epochs, check_same_run
from jaxddp.tracking.run_folder import check_same_data, claim_output
from jaxddp.tracking.run_log import RunLog, frozen_notes, run_title
from torch_ref import models, optim
from torch_ref.amp import autocast, grad_scaler
from torch_ref.checkpoint import CHECKPOINT_FILE, checkpoint_size, load_checkpoint
from torch_ref.comm_hooks import register
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import wrap
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World
from torch_ref.gradient_log import GradientLog
from torch_ref.launch import launch
from torch_ref.loader import Loader, epoch_indices, evaluation_batches
from torch_ref.losses import cross_entropy
from torch_ref.state import TrainState, averaged_model
from torch_ref.train_loop import Run, last_good, train_epochs
from torch_ref.weights import load_weights

JAXDDP_CHECKPOINTS = "checkpoints"  # folder of jaxddp.train's checkpoints


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
        notes, changes = open_output(run, resources)
        log = resources.enter_context(
            RunLog(
                run.saved_config,
                Path(config.output) if first and config.output is not None else None,
                title=run_title(config, num_replicas(config), _framework(run)),
                notes=[
                    *frozen_notes(name for name, p in run.state.module.named_parameters() if not p.requires_grad),
                    *changes,
                ],
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=run.state.step if config.resume else None,
                resume_records=notes.get("records", 0),
                digests=run.dataset.digests if first and config.output is not None else None,
                quiet=not first,
            )
        )
        try:
            train_epochs(run, log)
        except MovedError as error:  # there is no place to look for checkpoints
            raise TrainingError(f"{error}") from None
        except TrainingError as error:
            raise TrainingError(f"{error}; {last_good(config)}") from None


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


def open_output(run: Run, resources: contextlib.ExitStack) -> tuple[dict[str, Any], list[str]]:
    """On rank 0, claim the run folder until `resources` close; with --resume, load its checkpoint on every rank.

    Returns:
        The notes of the checkpoint; on rank 0, a line on the options that change after it, if any do.

    Raises:
        InputError: the folder belongs to another run, or its checkpoint to another model or other data.
    """
    config, world, state = run.config, run.world, run.state
    notes: dict[str, Any] = {}
    changes: list[str] = []
    if config.output is not None and world.rank == 0:
        space = checkpoint_size(state)
        folder = resources.enter_context(claim_output(config.output, config.resume is not None, space))
        if config.resume is not None:
            check_same_data(folder, run.dataset.digests)
            check_same_epochs(folder, run.loader.steps_per_epoch)
    if config.resume is not None:
        world.barrier()  # until rank 0 owns the folder, another run may replace the checkpoint
        notes = resume(Path(config.resume), state, world.rank)
        check_not_done(config.resume, state.step, run.loader.steps_per_epoch, config.epochs)
        if world.rank == 0:
            changes = check_same_run(Path(config.resume), state.step, notes, run.saved_config, run.dataset.digests)
    if isinstance(run.model, DistributedDataParallel):
        look = [run.gradient_log.look] if config.detect_anomaly else []
        register(run.model, config, world, look, state.step)
    return notes, changes


def resume(folder: Path, state: TrainState, rank: int) -> dict[str, Any]:
    """Load the checkpoint in `folder` into `state`, and return its notes; without one, the run starts again."""
    if (folder / JAXDDP_CHECKPOINTS).exists():
        raise InputError(f"--resume {folder}: holds a run of jaxddp.train; resume it with jaxddp.train")
    if (folder / CHECKPOINT_FILE).exists():
        return load_checkpoint(folder / CHECKPOINT_FILE, state, rank)
    return {}


def _has_checkpoint(config: TorchConfig) -> bool:
    return config.resume is not None and (Path(config.resume) / CHECKPOINT_FILE).exists()


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


if __name__ == "__main__":
    cli.run(main, TorchConfig, "python -m torch_ref.train")
