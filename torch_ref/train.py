"""`python -m torch_ref.train`: the training of jaxddp.train, by torch's own DistributedDataParallel.

python -m torch_ref.train --model mlp --devices 4 --output runs/mlp
torchrun --nproc-per-node 4 -m torch_ref.train --model mlp --output runs/mlp
"""

import contextlib
import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxddp import cli
from jaxddp.config.ulimits import LEAST_FOR_TORCH, check_address_space
from torch_ref.config import TorchTrainerConfig

if __name__ == "__main__":
    PROG = "python -m torch_ref.train"
    with cli.one_line_errors(show_traceback=False):
        check_address_space(LEAST_FOR_TORCH)  # before torch is imported
        if cli.asks_for_help(sys.argv):
            cli.program_and_flags(sys.argv[1:], TorchTrainerConfig, PROG)  # prints the help, and exits
        import torch

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jaxddp.data.run_data import RunData, load_data
from jaxddp.data.sampler import shard_table
from jaxddp.errors import InputError, MovedError, NotFiniteError, TrainingError
from jaxddp.program import Program
from jaxddp.scripts import errors_located
from jaxddp.tracking.kept_program import program_changes
from jaxddp.tracking.resumed import check_not_done, check_same_epochs, check_same_run
from jaxddp.tracking.run_folder import check_same_data, claim_output
from jaxddp.tracking.run_log import RunLog, frozen_notes, run_title
from jaxddp.tracking.throughput import Throughput, tokens_in
from jaxddp.tracking.writers import check_installed
from torch_ref import optim
from torch_ref.amp import autocast, grad_scaler
from torch_ref.checkpoint import CHECKPOINT_FILE, checkpoint_size, load_checkpoint
from torch_ref.comm_hooks import register
from torch_ref.data_parallel import WithLoss, wrap
from torch_ref.ddp_methods import ddp_methods
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World
from torch_ref.gradient_log import GradientLog
from torch_ref.launch import launch
from torch_ref.lightning import Cadence
from torch_ref.loader import EvaluationBatches, Loader, epoch_indices
from torch_ref.losses import LossFunction
from torch_ref.program import OPTIMIZERS, MakeOptimizer, evaluation_of, loss_of, module_of, optimizer_of, program_of
from torch_ref.program_step import Optimizers, ProgramStep
from torch_ref.state import TrainState, averaged_model
from torch_ref.train_loop import Run, last_good, train_epochs
from torch_ref.weights import load_weights

JAXDDP_CHECKPOINTS = "checkpoints"  # folder of jaxddp.train's checkpoints


def main(config: TorchTrainerConfig) -> None:
    """Train as `config` asks, on every rank, and print, log and save the results."""
    if config.resume is not None:
        config = dataclasses.replace(config, output=config.resume)
    check_devices(config)
    program_of(config)  # before any process starts
    if config.print_shards:
        print_shards(config)
    else:
        launch(train, config)


def train(world: World, config: TorchTrainerConfig) -> None:
    """Train on one rank; only rank 0 prints, logs and saves.

    Raises:
        InputError: the parts of the run do not fit each other, or the folder belongs to another run.
        TrainingError: a loss is not finite, or replicas differ; checkpoints saved before remain valid.
    """
    first = world.rank == 0
    with contextlib.ExitStack() as resources:
        program = program_of(config)
        resources.enter_context(program.naming())
        resources.enter_context(errors_located(program.path or "", only_users=True))
        run = build(world, config)
        notes, changes = open_output(run, resources)
        log = resources.enter_context(
            RunLog(
                run.saved_config,
                Path(config.output) if first and config.output is not None else None,
                title=run_title(run.program, config, num_replicas(config), _framework(run), OPTIMIZERS),
                notes=[
                    *frozen_notes(name for name, p in run.state.module.named_parameters() if not p.requires_grad),
                    *run.lines,
                    *changes,
                ],
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=run.state.step if config.resume else None,
                resume_records=notes.get("records", 0),
                digests=run.data.digests if first and config.output is not None else None,
                program=run.program,
                quiet=not first,
                memory=run.memory,
            )
        )
        try:
            train_epochs(run, log, notes)
        except MovedError as error:  # there is no place to look for checkpoints
            raise TrainingError(f"{error}") from None
        except (RuntimeError, InputError) as error:
            told = run.loader.of_workers(error)
            if not isinstance(told, TrainingError):
                raise
            of_nan = isinstance(told, NotFiniteError) and run.program.path is not None
            place = run.data.place_of_nan() if of_nan else None
            raise TrainingError("; ".join(filter(None, [f"{told}", place, last_good(config)]))) from None


def build(world: World, config: TorchTrainerConfig) -> Run:
    """Build the parts of a run, before its first step.

    Raises:
        InputError: the parts do not fit each other.
    """
    program = program_of(config)
    if config.join and program.get("on_step_end"):
        raise InputError(
            f"--join: ranks without examples take no part in {program.name}'s on_step_end; leave one of them out, or "
            "use jaxddp.train"
        )
    data = load_data(program, config)
    config = dataclasses.replace(config, best_metric=data.full_name(config.best_metric))
    _check_same_stream(data, world)
    replicas = num_replicas(config)
    ranks = range(replicas) if config.strategy == "single" else [world.rank]
    reading: dict[str, Any] = {"num_workers": config.data_workers, "timeout": config.stall_timeout}
    loader = Loader(data.train, config, replicas, ranks, world.device, sampler=program.get("sampler"), **reading)
    module = module_of(program, config).to(world.device)
    loss_fn = autocast(loss_of(program, config.detect_anomaly), config.amp)
    if config.sync_batch_norm and world.world_size > 1:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, world.group)
    else:
        _check_batch_norm(config, loader, module, loss_fn)
    config.check_square(sum(p.numel() for p in module.parameters() if p.requires_grad))
    lines: list[str] = []
    if (path := config.weights or config.weights_partial) is not None and not _has_checkpoint(config):
        load_weights(path, module, program, lines if config.weights_partial else None)
    optimizer, scheduler, step = _optimizer(program, config, module, loader, world)
    averaged, scaler = (
        averaged_model(module, config.ema_decay, config.swa_start is not None),
        grad_scaler(config, world.device),
    )
    state = TrainState(module, optimizer, scheduler, averaged=averaged, scaler=scaler)
    # Before resume: DDP sends rank 0's values.
    unused = bool(program.get("find_unused_parameters"))
    replica = module
    if step is None:
        replica = wrap(WithLoss(module, loss_fn, config.remat), world, config.strategy, config.buffers, unused)
    tests = {prefix: EvaluationBatches(source, config, world) for prefix, source in data.tests.items()}
    gradient_log = GradientLog(module, world, config)
    test_loss = autocast(evaluation_of(program, loss_of(program)), config.amp)
    parts = replica, state, loss_fn, test_loss, gradient_log, step
    throughput = Throughput(tokens_in(data.example()), workers=config.data_workers > 0)
    return Run(config, program, world, data, loader, tests, *parts, throughput, lines)


def _optimizer(
    program: Program, config: TorchTrainerConfig, module: nn.Module, loader: Loader, world: World
) -> tuple[Optimizer, Any, ProgramStep | None]:
    """Make the program's optimizer and scheduler, or those of `config`; and the program's step, if it has one."""
    total_steps = config.total_steps(loader.steps_per_epoch)
    if any(program.get(name) is not None for name in OPTIMIZERS):
        make = MakeOptimizer.of(program, total_steps=total_steps, steps_per_epoch=loader.steps_per_epoch)
        if (step := program.get("torch_step")) is not None:
            assert make.configure_optimizers is not None, "needed"
            ddp_methods(module)
            made = make.configure_optimizers(module)
            optimizers: Any = Optimizers(made, module)
            return optimizers, None, ProgramStep(step, module, made, world)
        cadence = Cadence(loader.steps_per_epoch, config.accumulation_steps)
        return *optimizer_of(make, module, list(module.parameters()), cadence), None
    scaled = config.with_scaled_lr(num_replicas(config))
    return *optim.from_config(module.parameters(), scaled, total_steps, world), None


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
        check_installed(config)
        folder = resources.enter_context(claim_output(config.output, config.resume is not None, space))
        if config.resume is not None:
            check_same_data(folder, run.data.digests, run.program.file_name)
            check_same_epochs(folder, run.loader.steps_per_epoch)
    if config.resume is not None:
        world.barrier()  # until rank 0 owns the folder, another run may replace the checkpoint
        notes = resume(Path(config.resume), state, world.rank)
        check_not_done(config.resume, state.step, run.loader.steps_per_epoch, config.epochs)
        if world.rank == 0:
            changes = check_same_run(Path(config.resume), state.step, notes, run.saved_config, run.data.digests)
            changes += program_changes(Path(config.resume), run.program)
    changes += run.data.begin(config, state.step, notes)
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


def _has_checkpoint(config: TorchTrainerConfig) -> bool:
    return config.resume is not None and (Path(config.resume) / CHECKPOINT_FILE).exists()


def print_shards(config: TorchTrainerConfig) -> None:
    """Print the examples of each replica in each step of the first epoch."""
    program = program_of(config)
    size, replicas = len(load_data(program, config).train), num_replicas(config)
    indices = epoch_indices(size, config, replicas, program.get("sampler"))
    print(shard_table(indices, config.per_replica_batch_size(replicas), size))


def _framework(run: Run) -> str:
    if run.config.strategy == "single":
        return f"torch, one process on {run.world.device.type}"
    way = "torch DDP" if run.config.strategy == "ddp" else "torch, averaged by hand"
    return f"{way}, {torch.distributed.get_backend(run.world.group)}, world size {run.world.world_size}"


def _check_same_stream(data: RunData, world: World) -> None:
    """Raise `InputError` if this rank's stream begins with another example than rank 0's."""
    if data.stream is not None and world.broadcast_object(digest := data.train.digest()) != digest:
        raise InputError(
            f"{data.train.where}: rank {world.rank} reads other examples than rank 0; all must read the same stream"
        )


def _check_batch_norm(config: TorchTrainerConfig, loader: Loader, module: nn.Module, loss_fn: LossFunction) -> None:
    """Raise `InputError` before training if BatchNorm will meet a micro-batch with one value per channel."""
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return
    batch = loader.smallest_micro_batch()
    try:
        with torch.no_grad():
            loss_fn(copy.deepcopy(module), batch)
    except ValueError as error:
        size = len(next(iter(batch.values())))
        raise InputError(
            f"--global-batch-size {config.global_batch_size}: leaves a micro-batch of {size} on a replica, "
            f"where BatchNorm cannot train; choose another size{'' if config.join else ', or --drop-last-batch'}"
        ) from error


if __name__ == "__main__":
    cli.run(lambda config, _: main(config), TorchTrainerConfig, PROG, sys.argv[1:])
