"""Gradient accumulation with `no_sync` in a user's own loop, against torch DDP."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxddp import models, optim
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn import torch_weights
from jaxddp.nn.functional import cast
from jaxddp.parity.cases import Case
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.records import Tensors
from jaxddp.parity.workers import Workers
from tests.support.cases import small_case

TOLERANCE = 1e-12  # float64; measured: up to 3.4e-15


def steps_of(case: Case, start: Tensors) -> Iterator[tuple[Tensors, float]]:
    """Yield parameters and buffers under torch's names, and the mean loss, after each step."""
    config, replicas = case.config, Replicas(jax.devices()[: case.world_size])
    ddp = DistributedDataParallel(
        models.build(config, case.dataset()),
        optim.from_config(config, case.steps),
        replicas=replicas,
        loss_normalization=config.loss_normalization,
        clip_grad_norm=config.clip_grad_norm,
        dtype=case.dtype,
    )
    like = cast(ddp.functional.params, case.dtype), cast(ddp.functional.buffers, case.dtype)
    state = ddp.init(*torch_weights.from_torch(start, *like))
    for head, last, _ in case.batches():
        gathered = None
        count = 0 if head is None else head["y"].shape[1]  # an epoch's last batch has fewer
        for number in range(count):
            micro_batch = {name: x[:, number] for name, x in head.items()}
            gathered = ddp.no_sync(state, replicas.shard(micro_batch), gathered)
        state, sums = ddp.step(state, replicas.shard(last), gathered)
        tensors = torch_weights.to_torch(jax.device_get({**state.params, **state.buffers}))
        yield tensors, float(sums["loss"] / sums["count"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"momentum": 0.9, "clip_grad_norm": 0.1, "loss_normalization": "global", "ignored_labels": 0.3}),
        ("char_mlp", {"momentum": 0.9}),  # with BatchNorm, whose buffers come from rank 0
    ],
)
def test_a_no_sync_loop_takes_the_steps_of_torch_ddp(
    model: str, options: dict, world_size: int, workers: Workers
) -> None:
    case = small_case(model, "sgd", world_size, accumulation_steps=4, global_batch_size=32 * world_size, **options)
    worst = 0.0
    with jax.enable_x64(True):
        start = case.initial_weights()
        torch_records = workers.torch.run(case, start).records
        for (params, loss), record in zip(steps_of(case, start), torch_records, strict=True):
            expected = {**record["params"], **record["buffers"]}
            worst = max([worst, *residuals(params, expected, start).values()])
            if case.config.loss_normalization == "global":
                assert loss == pytest.approx(float(np.mean(record["local_loss"]["loss"])), rel=TOLERANCE)
    assert worst < TOLERANCE
