"""`no_sync`: the same step as with all micro-batches at once, and nothing is sent before the last one."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxddp import optim
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.nn.losses import Batch
from tests.support.step_cases import Arrays, Net, dealt, distance, first

STEPS = 3
TOLERANCE = 1e-14  # float64, relative to an array's largest value; measured: 2.2e-16
FAULT = 1e-2  # smallest difference that a planted fault must cause; measured: 0.6


def ddp_of(world_size: int, bn: str | None = None, dropout: float = 0.0, **options: Any) -> DistributedDataParallel:
    optimizer = optim.sgd(0.3, momentum=0.9)
    return DistributedDataParallel(Net(bn, dropout), optimizer, replicas=first(world_size), dtype="float64", **options)


def micro_batches(world_size: int, micro: Sequence[int], step: int) -> list[Batch]:
    """Return the micro-batches of one step, leaves (W, B, ...), in the order in which `steps` takes them."""
    batch = dealt(world_size, STEPS, micro)
    head = [{n: x[:, step, i] for n, x in (batch.head or {}).items()} for i in range(len(micro) - 1)]
    return [*head, {name: x[:, step] for name, x in batch.last.items()}]


def one_by_one(ddp: DistributedDataParallel, micro: Sequence[int], forget: bool = False) -> Arrays:
    state = ddp.init()
    for step in range(STEPS):
        *head, last = map(ddp.replicas.shard, micro_batches(ddp.world_size, micro, step))
        gathered = None
        for batch in head:
            gathered = ddp.no_sync(state, batch, None if forget else gathered)
        state, sums = ddp.step(state, last, gathered)
    return jax.device_get({**state.params, **state.buffers, **sums})


def at_once(ddp: DistributedDataParallel, micro: Sequence[int]) -> Arrays:
    state, sums = ddp.steps(ddp.init(), ddp.replicas.shard(dealt(ddp.world_size, STEPS, micro)))
    return jax.device_get({**state.params, **state.buffers, **{name: values[-1] for name, values in sums.items()}})


@pytest.mark.large
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("micro", "options"),
    [
        pytest.param((3, 3, 3, 1), {"loss_normalization": "global", "clip_grad_norm": 0.05}, id="global, clipped"),
        pytest.param((3, 3, 3, 1), {"bn": "local"}, id="batch norm"),
        pytest.param((3, 3, 3, 1), {"dropout": 0.5}, id="dropout", marks=pytest.mark.large),
        pytest.param((4,), {}, id="one micro-batch"),
    ],
)
def test_micro_batches_one_by_one_equal_one_call(
    world_size: int, micro: Sequence[int], options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        ddp = ddp_of(world_size, **options)
        assert distance(one_by_one(ddp, micro), at_once(ddp, micro)) < TOLERANCE


@pytest.mark.large
def test_dropping_accumulated_gradients_is_caught() -> None:
    with jax.enable_x64(True):
        ddp = ddp_of(2)
        assert distance(one_by_one(ddp, (3, 3, 3, 1), forget=True), at_once(ddp, (3, 3, 3, 1))) > FAULT


def test_gradients_without_synchronization_differ_between_replicas() -> None:
    ddp = DistributedDataParallel(Net(), optim.sgd(0.3), replicas=first(2))
    state = ddp.init()
    batch = ddp.replicas.shard(micro_batches(2, (4,), step=0)[0])
    for name, gradient in ddp.no_sync(state, batch).result.gradients.items():
        of_replicas = np.asarray(gradient)
        assert of_replicas.shape == (2, *state.params[name].shape)
        assert not np.allclose(of_replicas[0], of_replicas[1])
    assert int(state.step) == 0  # the state was not donated


def test_nothing_is_sent_before_the_last_micro_batch() -> None:
    ddp = DistributedDataParallel(Net(), optim.adam(), replicas=first(2), clip_grad_norm=0.05)
    state = ddp.init()
    batch = ddp.replicas.shard(micro_batches(2, (4,), step=0)[0])
    gathered = ddp.no_sync(state, batch)

    def sent(*program_and_arguments: object) -> list[str]:
        program, *arguments = program_and_arguments
        text = program.lower(*arguments).compile().as_text()  # type: ignore[attr-defined]
        return re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", text)

    assert sent(ddp._no_sync, state, batch, gathered) == []
    assert sent(ddp._step, state, batch, gathered) == ["all-reduce"]


@pytest.mark.large
def test_batches_for_fewer_replicas_and_donated_arguments_are_refused() -> None:
    ddp = DistributedDataParallel(Net(), optim.adam(), replicas=first(2))
    state = ddp.init()
    batch = micro_batches(2, (4,), step=0)[0]
    with pytest.raises(ValueError, match="cannot be sharded over 2 replicas"):
        ddp.no_sync(state, {name: x[:1] for name, x in batch.items()})
    batch = ddp.replicas.shard(batch)
    gathered = ddp.no_sync(state, batch)
    ddp.no_sync(state, batch, gathered)
    for again in (ddp.no_sync, ddp.step):
        with pytest.raises(ValueError, match="gradients were used up"):
            again(state, batch, gathered)
    ddp.step(state, batch)
    with pytest.raises(ValueError, match="this state was used up"):
        ddp.no_sync(state, batch)
