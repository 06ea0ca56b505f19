"""Runs of a case in jax, recorded stage by stage under torch's names."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.comm_hooks import CommHook
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, differences, listed
from jaxddp.parity.fingerprints import fingerprints
from jaxddp.parity.flax_side.own_step import OwnStep
from jaxddp.parity.flax_side.side import FlaxSide, hyperparameters, optimizer_tensors
from jaxddp.parity.question import LOCAL_STAGES, Question, Trajectory, micro_batches_of
from jaxddp.parity.records import Record, Tensors
from jaxddp.state import Params, TrainState
from jaxddp.step.replica_step import ReplicaStep

Hook = CommHook | Callable[[Params], Params]
ToTorch = Callable[[Mapping[str, Any]], Tensors]


def free_records(
    case: Question,
    weights: Tensors,
    *,
    replicas: Replicas | None = None,
    batches: Iterable[MicroBatches] | None = None,
    comm_hook: Hook | None = None,
) -> Iterator[Record]:
    """Take the case's steps, each from the state that the one before has left, and yield their records.

    Args:
        case: model or port, world size, dtype and batches.
        weights: initial weights under torch's names.
        replicas: replicas to run on; None: the first `world_size` devices.
        batches: batches that replace the case's, one per step.
        comm_hook: communication hook that replaces the case's.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side, replicas, step = _program(case, replicas, comm_hook)
        params, buffers = side.from_torch(weights)
        axes = side.replica_step.axes
        state = side.replica_step.start(params, buffers, replicas)
        for number, batch in enumerate(case.batches() if batches is None else batches):
            state = _restored(side, state, number)
            state, stages = step(replicas.place(state, axes), replicas.shard(batch))
            yield _record(jax.device_get(stages), side.to_torch, batch)


def forced_records(
    case: Question,
    reference: Trajectory,
    *,
    replicas: Replicas | None = None,
    comm_hook: Hook | None = None,
) -> Iterator[Record]:
    """Take every step from the reference's state before it and yield the records; no step inherits a difference.

    Only the optimizer state carries over from step to step: the optimizer is given the reference's gradients in every
    step, and "update" is its output. A port's own step contains its optimizer, and gives it the step's own gradients.

    Args:
        case: model or port, world size, dtype and batches.
        reference: torch's run of the case.
        replicas, comm_hook: see `free_records`.
    """
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side, replicas, step = _program(case, replicas, comm_hook)
        optimizer = side.replica_step.optimizer
        update = jax.jit(optimizer.update)
        params, buffers = side.from_torch(reference.start)
        axes, start = side.replica_step.axes, side.replica_step.init(params, buffers)
        opt_state, scaler, comm_state = start.opt_state, start.scaler, replicas.start(start, axes).comm_state
        for number, (batch, theirs) in enumerate(zip(case.batches(), reference.records, strict=False)):
            state = TrainState(jnp.int32(number), params, buffers, opt_state, comm_state, scaler=scaler)
            state = _restored(side, state, number)
            after, stages = step(replicas.place(state, axes), replicas.shard(batch))
            comm_state, scaler = after.comm_state, after.scaler
            record = dict(_record(jax.device_get(stages), side.to_torch, batch))
            if isinstance(side.replica_step, OwnStep):
                opt_state = after.opt_state
                updates = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), after.params, params)
            else:
                # Where torch has no gradient, as for frozen parameters, use jax's: its optimizer has to mask it.
                ours = record.get(side.given, record["gradients"])
                gradients, _ = side.from_torch({**reference.start, **ours, **theirs[side.given]})
                updates, opt_state = update(gradients, state.opt_state, params)
            record["update"] = side.to_torch(jax.device_get(updates))
            record["optimizer_state"] = optimizer_tensors(jax.device_get(opt_state), params, side.to_torch)
            shown = hyperparameters(jax.device_get(opt_state))
            record["hyperparameters"] = {name: np.asarray(value) for name, value in shown.items()}
            yield record
            params, buffers = side.from_torch({**theirs["params"], **theirs["buffers"]})


def starting_weights(case: Question, weights: Tensors) -> list[Tensors]:
    """Return the parameters that each replica starts from, made by the port's `flax_start` if it has one.

    Args:
        case: model or port.
        weights: initial weights under torch's names.

    Raises:
        InputError: `flax_start` returns anything but the model's parameters.
    """
    with jax.enable_x64(case.dtype == "float64"):
        side = case.flax_side()
        if side.start is None:
            return [weights] * case.world_size
        params, _ = side.from_torch(weights)
        of_ranks = [side.start(params, rank) for rank in range(case.world_size)]
        for rank, started in enumerate(of_ranks):
            if problems := differences(started, params):
                raise InputError(f"flax_start(params, {rank}): must return the parameters: {listed(problems)}")
        return [side.to_torch(jax.device_get(started)) for started in of_ranks]


def forget_programs() -> None:
    """Drop the compiled programs of all cases, because a port's file may have changed since."""
    _program.cache_clear()


def _restored(side: FlaxSide, state: TrainState, steps: int) -> TrainState:
    """Save and load the state by the port's `flax_restore` after `restore_at` steps; else return it unchanged."""
    return side.restore(state) if side.restore is not None and steps == side.restore_at else state


@lru_cache(maxsize=2)
def _program(case: Question, replicas: Replicas | None, comm_hook: Hook | None) -> tuple[FlaxSide, Replicas, Any]:
    """Build the flax side, its replicas, and (state, batch) -> (replica 0's next state, stages of all replicas).

    The result is cached because a case is run freely and then forced, and compiling takes most of the time.
    """
    side = case.flax_side()
    replicas = replicas or Replicas(jax.devices()[: case.world_size])
    step = side.replica_step
    if isinstance(step, ReplicaStep) and comm_hook is not None:
        step = dataclasses.replace(step, comm_hook=comm_hook)
        side = dataclasses.replace(side, replica_step=step)

    def without_metrics(state: TrainState, batch: MicroBatches) -> tuple[TrainState, dict[str, Any]]:
        next_state, _, stages = step(state, batch)
        return next_state, stages

    return side, replicas, replicas.map(without_metrics, (step.axes, 0), (step.axes, 0))


def _record(stages: dict[str, Any], to_torch: ToTorch, batch: MicroBatches) -> Record:
    """Return the stages under torch's names: local stages of all replicas, shared stages of replica 0.

    A tensor of a shared stage that differs between replicas is also in "spread", as "stage:tensor", of all replicas.
    """
    world_size = len(next(value for stage, value in stages.items() if stage.endswith("local_loss")))
    record: dict[str, Tensors] = {"samples": _samples(batch, world_size), "spread": {}}
    for stage, value in stages.items():
        if stage.endswith("local_loss"):
            record[stage] = {"loss": value}
        elif stage.endswith(LOCAL_STAGES):
            record[stage] = _stacked([to_torch(_of_replica(value, rank)) for rank in range(world_size)])
        else:
            record[stage] = to_torch(_of_replica(value, 0))
            if any(_differs(x) for x in value.values()):
                of_all = _stacked([to_torch(_of_replica(value, rank)) for rank in range(world_size)])
                record["spread"] |= {f"{stage}:{name}": x for name, x in of_all.items() if _differs(x)}
    return record


def _samples(batch: MicroBatches, world_size: int) -> Tensors:
    return _stacked([fingerprints(micro_batches_of(batch, rank)) for rank in range(world_size)])


def _of_replica(arrays: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    return {name: value[rank] for name, value in arrays.items()}


def _stacked(of_each: Sequence[Tensors]) -> Tensors:
    return {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}


def _differs(x: np.ndarray) -> bool:
    """Return whether the replicas' slices differ; NaN equals NaN here."""
    return not np.array_equal(x, np.broadcast_to(x[:1], x.shape), equal_nan=x.dtype.kind == "f")
