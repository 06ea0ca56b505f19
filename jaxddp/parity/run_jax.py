"""Takes a case through jaxddp."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.collectives import all_reduce_mean
from jaxddp.parity.case import LOCAL_STAGES, STAGES, Question, Record, Tensors, Trajectory
from jaxddp.parity.flax_side import FlaxSide
from jaxddp.replicas import Replicas
from jaxddp.state import TrainState
from jaxddp.step import CommHook, MicroBatches


def run_jax(
    case: Question,
    weights: Tensors,
    *,
    replicas: Replicas | None = None,
    batches: Iterable[MicroBatches] | None = None,
    comm_hook: CommHook = all_reduce_mean,
) -> Trajectory:
    """Take the case's steps with the product's own replica step.

    Args:
        weights: where to start, under torch's names.
        replicas: the first `world_size` devices if None.
        batches: other batches than the case's.
        comm_hook: another way for gradients to meet.
    """
    replicas = replicas or Replicas(jax.devices()[: case.world_size])
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side = case.flax_side()
        params, buffers = side.from_torch(weights)
        opt_state = side.replica_step.optimizer.init(params)
        state = replicas.replicate(TrainState(jnp.int32(0), params, buffers, opt_state))
        step = _mapped(side, replicas, comm_hook)
        records = []
        for batch in case.batches() if batches is None else batches:
            state, _, stages = step(state, replicas.shard(batch))
            records.append(_record(jax.device_get(stages), side.to_torch))
    return Trajectory(weights, records)


def run_forced(
    case: Question, reference: Trajectory, *, replicas: Replicas | None = None, comm_hook: CommHook = all_reduce_mean
) -> Trajectory:
    """Take every step from where the reference was before it, so that no step inherits a difference.

    The optimizer alone goes on by itself: it is given the reference's gradients in every step, and its
    "update" is what it makes of them.

    Args:
        reference: torch's run of the case, with updates (`with_updates`).
    """
    replicas = replicas or Replicas(jax.devices()[: case.world_size])
    with jax.enable_x64(case.dtype == "float64"), jax.default_matmul_precision("highest"):
        side = case.flax_side()
        optimizer = side.replica_step.optimizer
        update = jax.jit(optimizer.update)
        step = _mapped(side, replicas, comm_hook)
        params, buffers = side.from_torch(reference.start)
        opt_state = optimizer.init(params)
        records = []
        for batch, theirs in zip(case.batches(), reference.records, strict=True):
            state = replicas.replicate(TrainState(jnp.int32(0), params, buffers, opt_state))
            _, _, stages = step(state, replicas.shard(batch))
            record = _record(jax.device_get(stages), side.to_torch)
            unused = {name: np.zeros_like(value) for name, value in reference.start.items()}  # torch has None
            gradients, _ = side.from_torch({**unused, **theirs["clipped_gradients"]})
            updates, opt_state = update(gradients, opt_state, params)
            records.append({**record, "update": side.to_torch(jax.device_get(updates))})
            params, buffers = side.from_torch({**theirs["params"], **theirs["buffers"]})
    return Trajectory(reference.start, records)


def _mapped(side: FlaxSide, replicas: Replicas, comm_hook: CommHook) -> Any:
    stage_axes = {stage: 0 if stage in LOCAL_STAGES else None for stage in STAGES}
    step = dataclasses.replace(side.replica_step, comm_hook=comm_hook)
    return replicas.map(step, (None, 0), (None, None, stage_axes))


def _record(stages: dict[str, Any], to_torch: Callable[[dict[str, Any]], Tensors]) -> Record:
    """Stages under torch's names; per-replica ones keep their leading axis."""
    record = {stage: to_torch(stages[stage]) for stage in STAGES if stage not in LOCAL_STAGES}
    per_replica = stages["local_gradients"]
    count = len(stages["local_loss"])
    of_each = [to_torch({name: value[rank] for name, value in per_replica.items()}) for rank in range(count)]
    local_gradients = {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}
    return {"local_loss": {"loss": stages["local_loss"]}, "local_gradients": local_gradients, **record}
