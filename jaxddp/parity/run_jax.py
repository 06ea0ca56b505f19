"""Takes a case through jaxddp."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxddp import models, optim
from jaxddp.collectives import all_reduce_mean
from jaxddp.data_parallel import DataParallel
from jaxddp.parity.case import LOCAL_STAGES, STAGES, Case, Record, Tensors, Trajectory
from jaxddp.replicas import Replicas
from jaxddp.step import CommHook, MicroBatches
from jaxddp.weights import from_torch, to_torch


def initial_weights(case: Case) -> Tensors:
    """The case's starting parameters and buffers, under torch's names."""
    with jax.enable_x64(case.config.dtype == "float64"):
        state = _data_parallel(case, Replicas(jax.devices()[:1]), all_reduce_mean).init()
        return to_torch(jax.device_get({**state.params, **state.buffers}))


def run_jax(
    case: Case,
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
    with jax.enable_x64(case.config.dtype == "float64"), jax.default_matmul_precision("highest"):
        ddp = _data_parallel(case, replicas, comm_hook)
        params, buffers = from_torch(weights, ddp.functional.params, ddp.functional.buffers)
        state = ddp.init(params, buffers)
        stage_axes = {stage: 0 if stage in LOCAL_STAGES else None for stage in STAGES}
        step = replicas.map(ddp.replica_step, (None, 0), (None, None, stage_axes))
        records = []
        for batch in case.batches() if batches is None else batches:
            state, _, stages = step(state, replicas.shard(batch))
            records.append(_record(jax.device_get(stages)))
    return Trajectory(weights, records)


def _data_parallel(case: Case, replicas: Replicas, comm_hook: CommHook) -> DataParallel:
    config = case.config
    return DataParallel(
        models.build(config, case.dataset()),
        optim.from_config(config, case.steps),
        replicas=replicas,
        loss_normalization=config.loss_normalization,
        clip_grad_norm=config.clip_grad_norm,
        comm_hook=comm_hook,
        dtype=config.dtype,
    )


def _record(stages: dict[str, Any]) -> Record:
    """Stages under torch's names; per-replica ones keep their leading axis."""
    record = {stage: to_torch(stages[stage]) for stage in STAGES if stage not in LOCAL_STAGES}
    per_replica = stages["local_gradients"]
    count = len(stages["local_loss"])
    of_each = [to_torch({name: value[rank] for name, value in per_replica.items()}) for rank in range(count)]
    local_gradients = {name: np.stack([tensors[name] for tensors in of_each]) for name in of_each[0]}
    return {"local_loss": {"loss": stages["local_loss"]}, "local_gradients": local_gradients, **record}
