"""Build the parts of a run from its program and its configuration."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxddp import optim
from jaxddp.config import TrainerConfig
from jaxddp.data.batches import of_batches
from jaxddp.data.run_data import RunData, load_data
from jaxddp.data.weight_files import check_values, fitted
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.agreement import check_same
from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError
from jaxddp.loader import MAX_STEPS_PER_DISPATCH, Loader
from jaxddp.nn.any_model import functional_of, transformation_of
from jaxddp.nn.functional import cast
from jaxddp.nn.program_losses import losses_of, metrics_of
from jaxddp.nn.torch_weights import start_values
from jaxddp.optim import schedules
from jaxddp.program import NAMES, Program, bound, built_in
from jaxddp.state import TrainState
from jaxddp.step.options import options
from jaxddp.step.program_step import program_step
from jaxddp.tracking.kept_program import program_digest
from jaxddp.tracking.throughput import Throughput, tokens_in
from jaxddp.train.parts import Run

NEEDED = ("jax_model", "train_data")


def build(config: TrainerConfig, cluster: Cluster | None = None, program: Program | None = None) -> Run:
    """Build the parts of a run, in this process or, with a cluster, in every process of it.

    Args:
        program: the program; None: the built-in one.

    Raises:
        InputError: the program lacks a name, or the parts do not fit each other, or the machine.
    """
    program = program or built_in()
    program.need(
        *NEEDED, "jax_optimizer" if program.get("jax_step") else "jax_loss", reason=", which jaxddp.train needs"
    )
    replicas = Replicas(prepare(config.devices, config.platform, cluster))
    config.per_replica_batch_size(replicas.world_size)
    program = program.bound(config).located()
    data = load_data(program, config)
    config = dataclasses.replace(config, best_metric=data.full_name(config.best_metric))
    if not replicas.in_one_process:
        train_digest = data.digests.get("train") or data.train.digest()  # of a stream, that of its first example
        tests = [digest for name, digest in data.digests.items() if name != "train"]
        read = {"training data": train_digest, "test data": ", ".join(tests)}
        from_where = program.name if program.path else "--dataset, --data-path"
        check_same({"programs": program_digest(program)}, replicas, "all must have the same program")
        check_same(read, replicas, f"all must read the same ({from_where})")
    try:
        loader = make_loader(config, data, replicas, program)
    except InputError as error:
        raise InputError(str(error).replace("global_batch_size", "--global-batch-size")) from None
    with program.naming():
        ddp = data_parallel(program, config, data, replicas, loader.steps_per_epoch)
        for test in data.tests.values():
            ddp.check_evaluation(test)
    lines: list[str] = []
    start = ddp.init() if config.resume is not None else start_state(config, ddp, program, lines)
    try:
        smallest = loader.smallest_batch()
        ddp.check(start, smallest)
        ddp.check(start, loader.without_padding(smallest))
    except InputError as error:
        if error.__cause__ is not None:
            raise  # an error of the file's code
        if str(error).partition(":")[0] in NAMES:
            raise InputError(f"{program.name}: {error}") from None
        advice = "choose another size" if config.join else "choose another size, or --drop-last-batch"
        raise InputError(f"--global-batch-size {config.global_batch_size}: {error}; {advice}") from None
    throughput = Throughput(tokens_in(data.example()), workers=config.data_workers > 0)
    return Run(config, program, data, loader, ddp, start, throughput, lines)


def data_parallel(
    program: Program, config: TrainerConfig, data: RunData, replicas: Replicas, steps_per_epoch: int
) -> DistributedDataParallel:
    """Return the trainer of the program's JAX side, with the options of `config`."""
    model = program.get("jax_model")()
    loss_fn = losses_of(program)
    functional = functional_of(model, loss_fn, data.example)
    given: dict[str, Any] = {"replicas": replicas, "dtype": config.dtype, "amp": config.amp, "seed": config.seed}
    given["metrics"] = metrics_of(program)
    total_steps = config.total_steps(steps_per_epoch)
    optimizer = bound(program.get("jax_optimizer"), total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    if (step := program.get("jax_step")) is not None:
        given["replica_step"] = program_step(functional, of_batches(step), optimizer, config.seed)
        return DistributedDataParallel(functional, None, loss_fn, **given)
    given["is_logged"] = config.is_logged
    if program.get("on_step_end"):  # which a dispatch of a given number of steps may call after any step
        every = 1 if config.steps_per_dispatch else config.callback_every
        given["is_logged"] = lambda step: config.is_logged(step) | (step % every == 0)
    if optimizer is None:
        scaled = config.with_scaled_lr(replicas.world_size)
        optimizer, given["lr"] = optim.from_config(scaled, total_steps), schedules.from_config(scaled, total_steps).lr
    else:
        optimizer = transformation_of(optimizer, model)
    given |= options(config, functional) | {"dropout_masks": config.dropout_masks}
    given["find_unused_parameters"] = bool(program.get("find_unused_parameters"))
    return DistributedDataParallel(functional, optimizer, loss_fn, **given)


def make_loader(config: TrainerConfig, data: RunData, replicas: Replicas, program: Program) -> Loader:
    """Return the loader of the training set, with the options of `config`."""
    ends = [int(config.evaluation_period.count)] if config.evaluation_period.unit == "steps" else []
    ends += [config.callback_every] if program.get("on_step_end") else []
    return Loader(
        data.train,
        replicas,
        global_batch_size=config.global_batch_size,
        accumulation_steps=config.accumulation_steps,
        steps_per_dispatch=config.steps_per_dispatch,
        max_steps_per_dispatch=min(MAX_STEPS_PER_DISPATCH, config.verify_every or MAX_STEPS_PER_DISPATCH),
        ends_every=math.gcd(*ends) if ends else None,
        shuffle=config.shuffle,
        seed=config.seed,
        drop_last=config.drop_last,
        drop_last_batch=config.drop_last_batch,
        join=config.join,
        sampler=program.get("sampler"),
        num_workers=config.data_workers,
        timeout=0.9 * config.stall_timeout,  # before the watch over the run, which cannot name the example
    )


def start_state(config: TrainerConfig, ddp: DistributedDataParallel, program: Program, lines: list[str]) -> TrainState:
    """Return the state before the first step, with the values of a file of weights or of the model.

    Args:
        lines: gets a line on what --weights-partial leaves out.
    """
    path, some = config.weights or config.weights_partial, lines if config.weights_partial else None
    if path is None:
        return ddp.init()
    like = cast(ddp.functional.params, config.dtype), cast(ddp.functional.buffers, config.dtype)

    def of_twin(tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state_dict of the program's torch model; with --weights-partial, only the tensors that fit."""
        from jaxddp.parity.convert.twin_files import to_jax

        if some is not None:
            check_values(tensors, tensors)
            missing = {n: np.full(tuple(x.shape), np.nan) for n, x in program.get("torch_model")().state_dict().items()}
            tensors = fitted(tensors, missing, f"--weights-partial {path}", some)
        arrays = to_jax(tensors, program, ddp.functional.shapes)
        return {name: x for name, x in arrays.items() if some is None or not np.isnan(x).any()}

    has_twin = program.get("torch_model") is not None and (some is None or program.get("names"))
    return ddp.init(*start_values(path, *like, of_twin if has_twin else None, some))
