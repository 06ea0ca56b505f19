"""Loader: equality with torch's DistributedSampler and DataLoader, and fetching ahead of the consumer."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from jaxddp import loader as loader_module
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.loader import Loader
from tests.support.step_cases import first

Steps = list[list[list[list[int]]]]  # [step][rank][micro-batch][example]


def arrays(size: int) -> dict[str, np.ndarray]:
    """Distinguishable examples."""
    return {"x": np.arange(2.0 * size, dtype=np.float32).reshape(size, 2), "id": np.arange(size)}


def ours(batches: Iterator[MicroBatches]) -> Steps:
    """Return the example ids of each step."""
    steps = []
    for batch in batches:
        last = np.asarray(batch.last["id"])  # (W, K, B')
        head = np.empty((*last.shape[:2], 0, 0), int) if batch.head is None else np.asarray(batch.head["id"])
        for k in range(last.shape[1]):
            steps.append([[*head[r, k].tolist(), last[r, k].tolist()] for r in range(len(last))])
    return steps


def torchs(
    size: int, world_size: int, batch: int, micro: int, epoch: int, drop_last_batch: bool = False, **options: Any
) -> Steps:
    """Return the example ids that a DataLoader with a DistributedSampler gives each rank in each step."""
    dataset, ranks = TensorDataset(torch.arange(size)), []
    for rank in range(world_size):
        sampler = DistributedSampler(dataset, world_size, rank, **options)
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=drop_last_batch)
        ranks.append([[part.tolist() for part in ids.split(micro)] for (ids,) in loader])
    return [list(step) for step in zip(*ranks, strict=True)]


def check_against_torch(
    replicas: Replicas,
    size: int,
    micro: int,
    accumulation: int,
    epoch: int,
    start: int,
    per_dispatch: int,
    **options: Any,
) -> None:
    world_size, batch = replicas.world_size, micro * accumulation
    expected = torchs(size, world_size, batch, micro, epoch, **options)

    def build() -> Loader:
        return Loader(
            arrays(size),
            replicas,
            global_batch_size=batch * world_size,
            accumulation_steps=accumulation,
            steps_per_dispatch=per_dispatch,
            **options,
        )

    if not expected:
        with pytest.raises(InputError, match="larger than the"):
            build()
        return
    loader = build()
    start = min(start, len(expected) - 1)
    assert ours(loader.host_batches(epoch, start)) == expected[start:]
    assert loader.steps_per_epoch == len(expected)
    sizes = [sum(len(part) for rank in step for part in rank) for step in expected]
    assert [loader.examples_in(len(expected) * epoch + step) for step in range(len(expected))] == sizes
    assert loader.examples_per_epoch == sum(sizes)
    last = loader.smallest_batch().last["id"]
    assert last.shape[::2] == (world_size, len(expected[-1][0][-1]))


SIZES = {
    "size": st.integers(1, 60),
    "world_size": st.integers(1, 9),
    "micro": st.integers(1, 4),
    "accumulation": st.integers(1, 3),
    "epoch": st.integers(0, 3),
    "shuffle": st.booleans(),
    "per_dispatch": st.integers(1, 4),
}


@given(
    **SIZES,
    start=st.integers(0, 5),
    drop_last=st.booleans(),
    drop_last_batch=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_every_batch_of_every_rank_equals_torchs(world_size: int, **case: Any) -> None:
    check_against_torch(VirtualReplicas(world_size), **case)


def test_epochs_in_any_order_equal_torchs() -> None:
    loader = Loader(arrays(21), first(2), global_batch_size=8, seed=3)
    for epoch in (0, 1, 1, 5, 2, 0):
        assert ours(loader.epoch(epoch)) == torchs(21, 2, 4, 4, epoch, seed=3), epoch


def test_each_device_holds_only_its_own_examples() -> None:
    replicas = first(4)
    loader = Loader(arrays(32), replicas, global_batch_size=16, accumulation_steps=2, steps_per_dispatch=2)
    (batch,) = loader.epoch(0)
    for leaf in jax.tree.leaves(batch):
        assert [shard.device for shard in leaf.addressable_shards] == replicas.devices
        assert {shard.data.shape[:2] for shard in leaf.addressable_shards} == {(1, 2)}
    np.testing.assert_array_equal(batch.last["x"], arrays(32)["x"][np.asarray(batch.last["id"])])


def test_float64_stays_float64_on_the_devices() -> None:
    loader = Loader({"x": np.full((4, 1), 1 / 3)}, first(2), global_batch_size=4)
    with jax.enable_x64(True):
        (batch,) = loader.epoch(0)
        assert (np.asarray(batch.last["x"]) == 1 / 3).all()


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (10, {"global_batch_size": 6}, r"global_batch_size 6: must be divisible by 4 replicas x 1 accumulation"),
        (10, {"global_batch_size": 8, "accumulation_steps": 3}, "by 4 replicas x 3 accumulation steps"),
        (10, {"global_batch_size": 16, "drop_last_batch": True}, "16: larger than the 10 examples"),
        (3, {"global_batch_size": 4, "drop_last": True}, "4: larger than the 3 examples"),
        *((8, {"global_batch_size": n}, f"^global_batch_size {n}: must be at least 1$") for n in (0, -4)),
        *((8, {"global_batch_size": 4, "accumulation_steps": n}, f"^accumulation_steps {n}: must") for n in (0, -4)),
    ],
)
def test_a_batch_size_that_does_not_fit_is_refused(size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Loader(arrays(size), first(4), **options)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"different lengths: {'x': 10, 'y': 9}"):
        Loader({"x": np.zeros(10), "y": np.zeros(9)}, first(2), global_batch_size=2)


def test_dispatches_are_bounded_and_split_the_epoch_evenly() -> None:
    assert Loader(arrays(100), first(2), global_batch_size=2).steps_per_dispatch == 25  # of 50, at most 32
    assert Loader(arrays(3), first(2), global_batch_size=8).steps_per_dispatch == 1
    big = np.broadcast_to(np.float32(0), (8, 2**23))  # 32 MiB per example
    assert Loader({"x": big}, first(2), global_batch_size=2).steps_per_dispatch == 1


# ---- fetching ahead of the consumer


class Watched(np.ndarray):
    """Array that counts how often examples are taken, and fails the `fail_at`-th time."""

    taken = 0
    fail_at = 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            self.taken += 1
            if self.taken == self.fail_at:
                raise OSError("disk on fire")
        return np.asarray(super().__getitem__(index))


def watched(fail_at: int = 0) -> tuple[Watched, Loader]:
    array = np.zeros((40, 1), np.float32).view(Watched)
    array.fail_at = fail_at
    return array, Loader({"x": array}, first(2), global_batch_size=2, steps_per_dispatch=1)


def test_an_epoch_gathers_each_batch_once() -> None:
    array, loader = watched()
    assert len(list(loader.epoch(0))) == array.taken == 20


@pytest.mark.parametrize("seen", [1, 3])
def test_gathering_ends_when_the_consumer_stops(seen: int) -> None:
    array, loader = watched()
    batches = loader.epoch(0)
    assert len(list(itertools.islice(batches, seen))) == seen
    batches.close()
    assert seen < array.taken <= seen + 3  # only a little ahead, since batches occupy the devices' memory


@pytest.mark.parametrize("fail_at", [1, 4])
def test_an_error_is_raised_only_after_the_batches_before_it(fail_at: int) -> None:
    batches = watched(fail_at)[1].epoch(0)
    assert len(list(itertools.islice(batches, fail_at - 1))) == fail_at - 1
    with pytest.raises(OSError, match="disk on fire"):
        next(batches)
    assert list(batches) == []


def test_epochs_are_shuffled_in_a_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled: list[tuple[int, str]] = []
    whole = loader_module.epoch_order

    def recorded(size: int, shuffle: Any, seed: int, epoch: int, sampler: Any) -> Any:
        if size == 12:  # a loader of another test may still shuffle ahead
            shuffled.append((epoch, threading.current_thread().name))
        return whole(size, shuffle, seed, epoch, sampler)

    monkeypatch.setattr(loader_module, "epoch_order", recorded)
    loader = Loader(arrays(12), first(2), global_batch_size=4)
    loader.smallest_batch()  # as the check before a run
    for epoch in range(2):
        assert len(ours(loader.epoch(epoch))) == 3
    assert all(order.result() is not None for order in loader._orders.values())
    assert shuffled == [(epoch, "shuffle") for epoch in range(3)]


def test_the_last_seed_of_torch_has_an_epoch() -> None:
    loader = Loader(arrays(8), first(2), global_batch_size=4, seed=2**64 - 1)
    assert len(ours(loader.epoch(0))) == 2
    with pytest.raises(InputError, match="seed"):
        next(loader.epoch(1))
