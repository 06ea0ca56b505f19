"""Takes a case through jaxddp."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.collectives import all_reduce_mean
from jaxddp.parity.case import LOCAL_STAGES, STAGES, Question, Record, Tensors, Trajectory
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
        stage_axes = {stage: 0 if stage in LOCAL_STAGES else None for stage in STAGES}
        step = replicas.map(
            dataclasses.replace(side.replica_step, comm_hook=comm_hook), (None, 0), (None, None, stage_axes)
        )
        records = []
        for batch in case.batches() if batches is None else batches:
            state, _, stages = step(state, replicas.shard(batch))
            records.append(_record(jax.device_get(stages), side.to_torch))
    return Trajectory(weights, records)


def _record(stages: dict[str, Any], to_torch: Callable[[dict[str, Any]], Tensors]) -> Record:
    """Stages under torch's names; per-replica ones keep their leading axis."""
    record = {stage: to_torch(stages[stage]) for stage in STAGES if stage not in LOCAL_STAGES}
    per_replica = stages["local_gradients"]
    count = len(stages["local_loss"])
    of_each = [to_torch({name: value[rank] for name, value in per_replica.items()}) for rank in range(count)]
    local_gradients = {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}
    return {"local_loss": {"loss": stages["local_loss"]}, "local_gradients": local_gradients, **record}
