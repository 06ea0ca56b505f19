"""Loader with `join`: every example once, on torch's ranks, with padding only at an epoch's end."""

from typing import Any

import jax
import numpy as np
from hypothesis import given, settings

from jaxddp.config import TrainConfig
from jaxddp.data.sampler import epoch_indices, shard_table
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.loader import Loader
from tests.support.step_cases import Arrays
from tests.unit.test_loader import SIZES
from torch_ref.loader import Loader as TorchLoader


def examples_of(batches: Any, world_size: int) -> list[list[list[list[int]]]]:
    """Return the examples without padding: [step][rank][micro-batch]."""
    steps = []
    for batch in batches:
        count = 0 if batch.head is None else batch.head["x"].shape[2]
        of_head = [jax.tree.map(lambda x, a=a: x[:, :, a], batch.head) for a in range(count)]
        for k in range(batch.last["x"].shape[1]):
            steps.append([[unpadded(part, rank, k) for part in (*of_head, batch.last)] for rank in range(world_size)])
    return steps


def unpadded(part: Arrays, rank: int, k: int) -> list[int]:
    x = part["x"][rank, k]
    return x[part["valid"][rank, k] > 0].tolist() if "valid" in part else x.tolist()


@given(**SIZES)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_every_example_is_used_once_and_on_the_same_rank_as_in_torch(
    size: int, world_size: int, micro: int, accumulation: int, epoch: int, shuffle: bool, per_dispatch: int
) -> None:
    batch = world_size * micro * accumulation
    options: dict[str, Any] = {"global_batch_size": batch, "accumulation_steps": accumulation, "shuffle": shuffle}
    arrays, replicas = {"x": np.arange(size)}, VirtualReplicas(world_size)
    loader = Loader(arrays, replicas, **options, steps_per_dispatch=per_dispatch, join=True)
    every = list(loader.host_batches(epoch))
    steps = examples_of(every, world_size)
    examples = [example for step in steps for rank in step for part in rank for example in part]
    assert sorted(examples) == list(range(size))
    padded = ["valid" in batch.last for batch in every]
    assert not any(padded[:-1]) and padded[-1] == (size % world_size > 0)  # the other batches need no mask

    active = []  # by step, the ranks that have examples
    for rank in range(world_size):
        reference = TorchLoader(arrays, TrainConfig(**options, join=True), world_size, [rank])
        theirs = [[part["x"].tolist() for part in step] for step in reference.epoch(epoch)]
        assert [step[rank] for step in steps[: len(theirs)]] == theirs
        assert all(not part for step in steps[len(theirs) :] for part in step[rank])
        assert loader.steps_per_epoch == reference.steps_per_epoch == len(steps)
        assert all(loader.examples_in(step) == reference.examples_in(step) for step in range(len(steps)))
        active.append([step < len(theirs) for step in range(len(steps))])
    highest = [max(rank for rank in range(world_size) if active[rank][step]) for step in range(len(steps))]
    buffers_of = np.concatenate([batch.buffers_of for batch in every], axis=1)
    assert (buffers_of == [*highest[1:], highest[-1]]).all()


def test_a_loader_that_repeats_examples_is_caught() -> None:
    loader = Loader({"x": np.arange(9)}, VirtualReplicas(2), global_batch_size=4)
    examples = [x for step in examples_of(loader.host_batches(0), 2) for rank in step for part in rank for x in part]
    assert sorted(examples) != list(range(9))


def test_the_shard_table_shows_that_nothing_is_repeated() -> None:
    table = shard_table(epoch_indices(9, 4, shuffle=False, join=True), 2, 9)
    assert table.splitlines()[2:4] == ["replica 0 | x1 x5  | x9", "replica 1 | x2 x6  |"]
    assert table.endswith("9 examples on 4 replicas: each used once")
