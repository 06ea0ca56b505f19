"""A training run: data, sampler, batch, replica step, mean over replicas, metrics, checkpoint."""

import contextlib
import dataclasses
import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import flag_kinds
from jaxddp.config.kinds import described, fits, plain
from jaxddp.data.sampler import shard_table
from jaxddp.distributed.agreement import check_same, check_sees
from jaxddp.distributed.cluster import Cluster, find
from jaxddp.distributed.devices import most_memory
from jaxddp.distributed.peers import Peers
from jaxddp.distributed.processes import joined
from jaxddp.distributed.stall import StallWatch
from jaxddp.errors import InputError
from jaxddp.nn.torch_weights import torch_name
from jaxddp.program import Program, built_in, check_flags, default_config, program_of
from jaxddp.scripts import errors_located
from jaxddp.signals import needing_no_reader
from jaxddp.state import TrainState
from jaxddp.tracking.console import Console
from jaxddp.tracking.folder_lock import LOCK_FILE
from jaxddp.tracking.kept_program import check_program, check_resumes, program_changes, resumed_configs
from jaxddp.tracking.resumed import check_kept, check_not_done, check_same_epochs, check_same_run, check_steps_per_epoch
from jaxddp.tracking.run_folder import check_same_data, claim_output
from jaxddp.tracking.run_log import RunLog, frozen_notes, run_title
from jaxddp.tracking.writers import check_installed
from jaxddp.train.build import build, start_state
from jaxddp.train.loop import train
from jaxddp.train.parts import Result, Run

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

CHECKPOINT_FOLDER = "checkpoints"
LATEST_SIGHT = 60  # seconds; NFS may show a new file this late


def run(program: Any = None, **flags: Any) -> Result:
    """Train a program from Python, like `jaxddp train` on the command line.

    Args:
        program: path of a program, a module, a mapping or an object with the names of one, see `jaxddp.program`;
            None: the built-in classifier.
        flags: the trainer's flags and the program's options, by their names in Python: `epochs=3`.

    Returns:
        The final state, the last test's metrics, and the weights.

    Raises:
        InputError: the program or a flag cannot be used.
        TrainingError: training has failed.

    >>> result = run(epochs=1, model="linear", platform="cpu", devices=2)  # doctest: +ELLIPSIS
    linear on digits  ·  adam, lr 0.001  ·  2 replicas x 16 examples  ·  JAX cpu
    epoch 1/1  train loss 2...
    test accuracy ...
    >>> sorted(result.weights)
    ['fc.bias', 'fc.weight']
    """
    loaded = built_in() if program is None else program_of(program)
    default = default_config(loaded, TrainerConfig)
    names = {f.name for f in dataclasses.fields(default)}
    if unknown := sorted(flags.keys() - names):
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise InputError(f"{unknown[0]}: not an option" + (f"; did you mean {near[0]}?" if near else ""))
    flags, kinds = {name: plain(value) for name, value in flags.items()}, flag_kinds(type(default))
    for name, value in flags.items():
        if not fits(value, kinds[name]):
            raise InputError(f"{name} = {value!r}: must be {described(kinds[name])}")
    if (folder := flags.get("resume")) is not None:
        check_program(Path(folder), loaded)
        saved, default = resumed_configs(Path(folder), default)
    config = dataclasses.replace(default, **flags)
    if folder is not None:
        check_resumes(config, saved, default)
    config.check_used(baseline=default)
    check_flags(loaded, config)
    return main(config, loaded)


def main(config: TrainerConfig, program: Program | None = None) -> Result:
    """Train as `config` asks, and print, log and save the results; of several processes, process 0 prints and logs."""
    program = program or built_in()
    if config.resume is not None:
        config = dataclasses.replace(config, output=config.resume)
    cluster = find(os.environ, config.coordinator, config.num_processes, config.process_id)
    config = dataclasses.replace(config, coordinator=None, num_processes=None, process_id=None)  # differ by process
    with joined(cluster, dataclasses.asdict(config), config.join_timeout) as peers:
        return train_alone_or_joined(config, program, cluster, peers)


def train_alone_or_joined(
    config: TrainerConfig, program: Program, cluster: Cluster | None, peers: Peers | None
) -> Result:
    """Train in this process, which has joined the others if there are any."""
    if jax.config.values["jax_disable_jit"]:
        raise InputError("JAX_DISABLE_JIT is set; jaxddp.train compiles its steps: unset it")
    with contextlib.ExitStack() as resources:
        resources.enter_context(errors_located(program.path or "", only_users=True))
        if config.output is not None:
            resources.enter_context(needing_no_reader())
        resources.enter_context(jax.enable_x64(config.dtype == "float64"))
        # On GPUs jax would multiply float32 matrices in TF32, which keeps 10 bits; torch does not.
        resources.enter_context(jax.default_matmul_precision("highest"))
        resources.enter_context(jax.transfer_guard("allow"))  # JAX_TRANSFER_GUARD is for programs under test
        remind = Console(1, 1, quiet=cluster is not None and cluster.process_id != 0).waiting
        tell = None if peers is None else peers.stalled
        with StallWatch(config.stall_timeout, tell=tell, remind=remind) as starting:
            starting.doing(f"the start of {program.name}: its data, its model or the trace of its step")
            run = build(config, cluster, program)
            if not config.verify_data:
                starting.doing(f"the reading of samples of {program.name}'s data, for their digest")
                run.data.digests  # noqa: B018 - kept
        if config.print_shards:
            if run.is_first:
                print(shard_table(run.loader.indices(0), run.loader.per_replica_batch_size, run.loader.dataset_size))
            return Result(run.start, {}, {})
        checkpoints, state, notes = open_output(run, resources)
        step = int(state.step)
        changes = check_same_run(Path(config.output or ""), step, notes, run.saved_config, run.data.digests)
        changes += run.data.begin(config, step, notes)
        processes = "" if cluster is None else f", {cluster.num_processes} processes"
        log = resources.enter_context(
            RunLog(
                run.saved_config,
                None if config.output is None or not run.is_first else Path(config.output),
                title=run_title(
                    run.program,
                    config,
                    run.ddp.world_size,
                    f"JAX {run.ddp.replicas.devices[0].device_kind}{processes}",
                    ("jax_optimizer",),
                ),
                notes=[
                    *frozen_notes(map(torch_name, run.ddp.frozen_parameters)),
                    *run.lines,
                    *changes,
                    *([] if config.resume is None else program_changes(Path(config.resume), run.program)),
                ],
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=step if config.resume else None,
                resume_records=notes.get("records", 0),
                digests=None if config.output is None else run.data.digests,
                program=run.program,
                quiet=not run.is_first,
                memory=lambda: most_memory(run.ddp.replicas.devices),
            )
        )
        resources.enter_context(program.naming())
        return train(run, state, log, checkpoints, tell)


def open_output(run: Run, resources: contextlib.ExitStack) -> "tuple[Checkpoints | None, TrainState, dict[str, Any]]":
    """Claim the run folder in the first process until `resources` close; with --resume, restore the last checkpoint.

    Returns:
        The checkpoints of the run, the state to train from, and the notes of the checkpoint that it comes from.

    Raises:
        InputError: the folder belongs to another run, or its checkpoint to another model or other data.
    """
    output, resume = run.config.output, run.config.resume is not None
    if output is None:
        return None, run.start, {}
    from jaxddp.checkpoint import Checkpoints  # imports Orbax, which takes 0.2 s

    space = sum(leaf.nbytes for leaf in jax.tree.leaves(run.ddp.unsharded(run.start)))
    folder = Path(output)
    if run.is_first:
        check_installed(run.config)
        folder = resources.enter_context(claim_output(output, resume, space))
    where, replicas = f"{'--resume' if resume else '--output'} {output}", run.ddp.replicas
    check_sees((folder / LOCK_FILE).read_text, replicas, where, min(LATEST_SIGHT, run.config.join_timeout))
    best = run.config.keep_best and f"test_{run.config.best_metric}"
    keep = run.config.keep_checkpoints, best, replicas, run.config.best_mode
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, *keep)
    resources.callback(checkpoints.close)
    if not resume:
        return checkpoints, run.start, {}
    check_same_data(folder, run.data.digests, run.program.file_name)
    check_kept(folder, CHECKPOINT_FOLDER)
    check_same_epochs(folder, run.loader.steps_per_epoch)
    check_same({"newest checkpoints": f"{checkpoints.latest_step}"}, replicas, f"{where} must be readable by all")
    if checkpoints.latest_step is None:  # the run ended before its first checkpoint
        return checkpoints, start_state(run.config, run.ddp, run.program, run.lines), {}
    restored = checkpoints.restore(run.ddp.unsharded(run.start))
    step = int(restored.step)
    notes = checkpoints.notes(step)
    check_steps_per_epoch(folder, notes["steps_per_epoch"], run.loader.steps_per_epoch)
    check_not_done(folder, step, run.loader.steps_per_epoch, run.config.epochs)
    return checkpoints, run.ddp.place_state(restored), notes
