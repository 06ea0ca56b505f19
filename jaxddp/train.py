"""`python -m jaxddp.train`: data, sampler, batch, replica step, mean over replicas, metrics, checkpoint."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxddp import cli
from jaxddp.config.ulimits import LEAST_FOR_JAX, check_address_space

if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        check_address_space(LEAST_FOR_JAX)
        with cli.variables_named("JAX_"):
            import jax.errors  # the first import of jax reads its environment variables

import jax

from jaxddp import models, optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.sampler import shard_table
from jaxddp.data_parallel import DataParallel
from jaxddp.distributed.agreement import check_same, check_sees
from jaxddp.distributed.cluster import Cluster, find
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.joining import tell_failure
from jaxddp.distributed.peers import Peers
from jaxddp.distributed.processes import joined
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.loader import MAX_STEPS_PER_DISPATCH, Loader
from jaxddp.nn.torch_weights import start_values, torch_name
from jaxddp.signals import needing_no_reader
from jaxddp.state import TrainState
from jaxddp.step.options import options
from jaxddp.tracking.folder_lock import LOCK_FILE
from jaxddp.tracking.resumed import check_kept, check_not_done, check_same_epochs, check_same_run, check_steps_per_epoch
from jaxddp.tracking.run_folder import check_same_data, claim_output
from jaxddp.tracking.run_log import RunLog, frozen_notes, run_title
from jaxddp.train_loop import Run, train

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

CHECKPOINT_FOLDER = "checkpoints"
LATEST_SIGHT = 60  # seconds; NFS may show a new file this late


def main(config: TrainConfig) -> None:
    """Train as `config` asks, and print, log and save the results; of several processes, process 0 prints and logs."""
    if config.resume is not None:
        config = dataclasses.replace(config, output=config.resume)
    cluster = find(os.environ, config.coordinator, config.num_processes, config.process_id)
    config = dataclasses.replace(config, coordinator=None, num_processes=None, process_id=None)  # differ by process
    with joined(cluster, dataclasses.asdict(config), config.join_timeout) as peers:
        train_alone_or_joined(config, cluster, peers)


def train_alone_or_joined(config: TrainConfig, cluster: Cluster | None, peers: Peers | None) -> None:
    """Train in this process, which has joined the others if there are any."""
    if jax.config.values["jax_disable_jit"]:
        raise InputError("JAX_DISABLE_JIT is set; jaxddp.train compiles its steps: unset it")
    with contextlib.ExitStack() as resources:
        if config.output is not None:
            resources.enter_context(needing_no_reader())
        resources.enter_context(jax.enable_x64(config.dtype == "float64"))
        # On GPUs jax would multiply float32 matrices in TF32, which keeps 10 bits; torch does not.
        resources.enter_context(jax.default_matmul_precision("highest"))
        resources.enter_context(jax.transfer_guard("allow"))  # JAX_TRANSFER_GUARD is for programs under test
        run = build(config, cluster)
        if config.print_shards:
            if run.is_first:
                print(shard_table(run.loader.indices(0), run.loader.per_replica_batch_size, run.loader.dataset_size))
            return
        checkpoints, state, notes = open_output(run, resources)
        step = int(state.step)
        changes = check_same_run(Path(config.output or ""), step, notes, run.saved_config, run.dataset.digests)
        processes = "" if cluster is None else f", {cluster.num_processes} processes"
        log = resources.enter_context(
            RunLog(
                run.saved_config,
                None if config.output is None or not run.is_first else Path(config.output),
                title=run_title(
                    config, run.ddp.world_size, f"JAX {run.ddp.replicas.devices[0].device_kind}{processes}"
                ),
                notes=[*frozen_notes(map(torch_name, run.ddp.frozen_parameters)), *changes],
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=step if config.resume else None,
                resume_records=notes.get("records", 0),
                digests=None if config.output is None else run.dataset.digests,
                quiet=not run.is_first,
            )
        )
        train(run, state, log, checkpoints, None if peers is None else peers.stalled)


def build(config: TrainConfig, cluster: Cluster | None = None) -> Run:
    """Build the parts of a run, in this process or, with a cluster, in every process of it.

    Raises:
        InputError: the parts do not fit each other, or the machine.
    """
    replicas = Replicas(prepare(config.devices, config.platform, cluster))
    config.per_replica_batch_size(replicas.world_size)
    dataset = datasets.load(config).astype(config.dtype)
    if not replicas.in_one_process:
        data = {"training data": dataset.digests["train"], "test data": dataset.digests["test"]}
        check_same(data, replicas, "all must read the same (--dataset, --data-path)")
    loader = make_loader(config, dataset, replicas)
    model = models.build(config, dataset)
    ddp = DataParallel(
        model,
        optim.from_config(config.with_scaled_lr(replicas.world_size), config.total_steps(loader.steps_per_epoch)),
        replicas=replicas,
        dtype=config.dtype,
        dropout_masks=config.dropout_masks,
        amp=config.amp,
        **options(config, model),
    )
    start = ddp.init() if config.resume is not None else _start(config, ddp)
    try:
        for last_batch in loader.host_batches(0, start_step=loader.steps_per_epoch - 1):  # the smallest batch
            ddp.check(start, last_batch)
            ddp.check(start, loader.without_padding(last_batch))
    except InputError as error:
        advice = "choose another size" if config.join else "choose another size, or --drop-last-batch"
        raise InputError(f"--global-batch-size {config.global_batch_size}: {error}; {advice}") from None
    return Run(config, dataset, loader, ddp, start)


def make_loader(config: TrainConfig, dataset: datasets.Dataset, replicas: Replicas) -> Loader:
    """Return the loader of the training set, with the options of `config`."""
    return Loader(
        dataset.train,
        replicas,
        global_batch_size=config.global_batch_size,
        accumulation_steps=config.accumulation_steps,
        steps_per_dispatch=config.steps_per_dispatch,
        max_steps_per_dispatch=min(MAX_STEPS_PER_DISPATCH, config.verify_every or MAX_STEPS_PER_DISPATCH),
        shuffle=config.shuffle,
        seed=config.seed,
        drop_last=config.drop_last,
        drop_last_batch=config.drop_last_batch,
        join=config.join,
    )


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
        folder = resources.enter_context(claim_output(output, resume, space))
    where, replicas = f"{'--resume' if resume else '--output'} {output}", run.ddp.replicas
    check_sees((folder / LOCK_FILE).read_text, replicas, where, min(LATEST_SIGHT, run.config.join_timeout))
    keep = run.config.keep_checkpoints, run.config.keep_best
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER, *keep, replicas)
    resources.callback(checkpoints.close)
    if not resume:
        return checkpoints, run.start, {}
    check_same_data(folder, run.dataset.digests)
    check_kept(folder, CHECKPOINT_FOLDER)
    check_same_epochs(folder, run.loader.steps_per_epoch)
    check_same({"newest checkpoints": f"{checkpoints.latest_step}"}, replicas, f"{where} must be readable by all")
    if checkpoints.latest_step is None:  # the run ended before its first checkpoint
        return checkpoints, _start(run.config, run.ddp), {}
    restored = checkpoints.restore(run.ddp.unsharded(run.start))
    step = int(restored.step)
    notes = checkpoints.notes(step)
    check_steps_per_epoch(folder, notes["steps_per_epoch"], run.loader.steps_per_epoch)
    check_not_done(folder, step, run.loader.steps_per_epoch, run.config.epochs)
    return checkpoints, run.ddp.place_state(restored), notes


def tell_others(argv: Sequence[str], reason: str) -> None:
    """If this process is one of several, report its bad flags to the others, so that they do not wait for it."""
    texts = [cli.value_of(name, argv) for name in ("--num-processes", "--process-id")]
    with contextlib.suppress(ValueError):  # a flag is not a number, or there is no cluster
        size, number = (None if text is None else int(text) for text in texts)
        if (cluster := find(os.environ, cli.value_of("--coordinator", argv), size, number)) is not None:
            tell_failure(cluster, reason)


def _start(config: TrainConfig, ddp: DataParallel) -> TrainState:
    """Return the state before the first step, with the values of --weights or of the model."""
    if config.weights is None:
        return ddp.init()
    return ddp.init(*start_values(config.weights, ddp.functional.params, ddp.functional.buffers))


if __name__ == "__main__":
    cli.run(main, TrainConfig, "python -m jaxddp.train", tell_others)
