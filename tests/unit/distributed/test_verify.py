"""Verification: any difference between replicas is found and named; identical replicas pass."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxddp import models, optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.distributed.verify import Verifier, fingerprint
from jaxddp.errors import TrainingError
from jaxddp.loader import Loader

WORLD_SIZE = 4
SHARDING = NamedSharding(Mesh(np.array(jax.devices()[:WORLD_SIZE]), ("replica",)), PartitionSpec())

Arrays = dict[str, np.ndarray]
Change = Callable[[np.ndarray], Any]

START: Arrays = {
    "kernel": np.array([[1.0, -1.0, 2.0], [0.0, np.nan, 1e-30]], "float32"),
    "long": np.where(np.arange(300) < 256, 1.0, 2.0).astype("float32"),
    "half": np.array([1.0, 2.0], "float16"),
    "brain": np.array(jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)),
    "steps": np.array([5, 7], "int32"),
    "mask": np.array([True, False]),
    "image": np.array([0, 255], "uint8"),
    "scalar": np.array(3.0, "float32"),
}


def replicated(copies: list[np.ndarray]) -> jax.Array:
    """Return an array marked as replicated whose copies on the devices are given."""
    placed = [jax.device_put(copy, device) for copy, device in zip(copies, jax.devices(), strict=False)]
    return jax.make_array_from_single_device_arrays(copies[0].shape, SHARDING, placed)


def planted(name: str, change: Change, ranks: tuple[int, ...] = (2,), start: Arrays = START) -> dict[str, jax.Array]:
    """Return a replicated tree in which `name` is changed on some replicas."""

    def copy(key: str, rank: int) -> np.ndarray:
        value = start[key].copy()
        if key == name and rank in ranks:
            change(value)
        return value

    return {key: replicated([copy(key, rank) for rank in range(WORLD_SIZE)]) for key in start}


@functools.cache
def verifier() -> Verifier:
    return Verifier(Replicas(jax.devices()[:WORLD_SIZE]))


def put(index: Any, value: Any) -> Change:
    return lambda array: array.__setitem__(index, value)


def swap(i: Any, j: Any) -> Change:
    def change(array: np.ndarray) -> None:
        array[i], array[j] = array[j].copy(), array[i].copy()

    return change


CHANGES: dict[str, tuple[str, Change, str]] = {
    "last bit": ("kernel", put((0, 0), np.nextafter(np.float32(1), np.float32(2))), "1.19e-07"),
    "tiny": ("kernel", put((1, 2), 2e-30), "1e-30"),
    "sign of zero": ("kernel", put((1, 0), -0.0), "0"),
    "a NaN": ("kernel", put((0, 0), np.nan), "inf"),
    "infinity": ("kernel", put((0, 0), np.inf), "inf"),
    "no NaN": ("kernel", put((1, 1), 0.0), "inf"),
    "swapped": ("kernel", swap((0, 0), (0, 2)), "1"),
    "swapped 1 and -1": ("kernel", swap((0, 0), (0, 1)), "2"),
    "swapped far apart": ("long", swap(0, 256), "1"),
    "two signs": ("long", lambda x: np.negative(x, out=x, where=np.arange(300) < 2), "2"),
    "all signs": ("long", lambda x: np.negative(x, out=x), "4"),
    "float16": ("half", put(1, 2.002), "0.00195"),
    "bfloat16": ("brain", put(0, 1.0078125), "0.00781"),
    "int32": ("steps", put(1, 8), "1"),
    "bool": ("mask", put(1, True), "1"),
    "uint8": ("image", put(1, 254), "1"),
    "scalar": ("scalar", put((), 3.5), "0.5"),
}


@pytest.mark.parametrize(("name", "change", "difference"), CHANGES.values(), ids=CHANGES)
def test_a_replica_that_differs_is_named(name: str, change: Change, difference: str) -> None:
    message = (
        rf"^replicas differ at step 17: {name} on replica 2 is up to {difference} away from the majority; "
        rf"replica 2 must be wrong \(1 of {len(START)} arrays differ\)$"
    )
    with pytest.raises(TrainingError, match=message):
        verifier().check(planted(name, change), step=17)


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_the_one_that_differs_from_the_majority_is_named_whichever_it_is(rank: int) -> None:
    message = f"scalar on replica {rank} is up to 1 away from the majority; replica {rank} "
    with pytest.raises(TrainingError, match=message):
        verifier().check(planted("scalar", put((), 4.0), (rank,)), step=0)


def test_all_that_differ_from_a_majority_are_named() -> None:
    tree = planted("scalar", put((), 4.0), (0,)) | {"steps": planted("steps", put(0, 9), (3,))["steps"]}
    with pytest.raises(
        TrainingError, match=r"steps on replica 3 is up to 4 away .*; replicas 0, 3 must be wrong \(2 of"
    ):
        verifier().check(tree, step=0)


def test_without_a_majority_nobody_is_blamed() -> None:
    tree = planted("scalar", put((), 4.0), (0, 2))
    message = r"scalar on replica [23] is up to 1 away from replica 0; no majority tells which is right \(1 of 8 arrays"
    with pytest.raises(TrainingError, match=message):
        verifier().check(tree, step=0)


def test_the_largest_difference_is_named() -> None:
    tree = planted("steps", put(0, 6)) | {"scalar": planted("scalar", put((), 9.0), (1,))["scalar"]}
    with pytest.raises(TrainingError, match=r"scalar on replica 1 is up to 6 away .* \(2 of 8 arrays differ\)"):
        verifier().check(tree, step=3)


def test_a_difference_in_the_low_word_of_float64_is_detected() -> None:
    with jax.enable_x64(True):
        start = {"w": np.ones(3)}
        tree = planted("w", put(2, np.nextafter(1, 2)), start=start)
        assert tree["w"].dtype == "float64"
        with pytest.raises(TrainingError, match=r"w on replica 2 is up to 2\.22e-16 away"):
            verifier().check(tree, step=0)
        verifier().check(planted("w", put(2, 1.0), start=start), step=0)


def test_replicas_are_named_by_rank_not_by_device() -> None:
    scalar = planted("scalar", put((), 4.0), (0,))["scalar"]
    backwards = Replicas(jax.devices()[:WORLD_SIZE][::-1])
    sharding = NamedSharding(Mesh(np.array(backwards.devices), ("replica",)), PartitionSpec())
    copies = [shard.data for shard in reversed(scalar.addressable_shards)]
    scalar = jax.make_array_from_single_device_arrays(scalar.shape, sharding, copies)
    with pytest.raises(TrainingError, match="scalar on replica 3 is"):
        Verifier(backwards).check({"scalar": scalar}, step=0)


def test_identical_replicas_pass() -> None:
    verifier().check(planted("kernel", lambda array: None), step=0)
    verifier().check(Replicas(jax.devices()[:WORLD_SIZE]).replicate(START), step=0)
    virtual = VirtualReplicas(3)
    Verifier(virtual).check(virtual.replicate({"w": np.ones(3)}), step=0)


# ---- fingerprints

SIZE = 6
WORDS = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31]), min_size=SIZE, max_size=SIZE)
fingerprint_of = jax.jit(fingerprint)


def check_tells_apart(a: np.ndarray, b: np.ndarray, of: Callable[[jax.Array], jax.Array] = fingerprint_of) -> None:
    assert of(jnp.asarray(a)) != of(jnp.asarray(b))


@settings(deadline=None, derandomize=True, database=None)
@given(WORDS, st.integers(0, SIZE - 1), st.integers(1, 2**32 - 1))
def test_any_change_of_one_word_changes_the_fingerprint(words: list[int], place: int, change: int) -> None:
    a = np.array(words, "uint32")
    b = a.copy()
    b[place] ^= np.uint32(change)
    check_tells_apart(a, b)


@settings(deadline=None, derandomize=True, database=None)
@given(WORDS, st.permutations(range(SIZE)))
def test_any_reordering_changes_the_fingerprint(words: list[int], order: list[int]) -> None:
    a = np.array(words, "uint32")
    assume((a[order] != a).any())
    check_tells_apart(a, a[order])


@settings(deadline=None, derandomize=True, database=None)
@given(WORDS, st.sets(st.integers(0, SIZE - 1), min_size=1))
def test_any_set_of_flipped_signs_changes_the_fingerprint(words: list[int], flipped: set[int]) -> None:
    a = np.array(words, "uint32")
    b = a.copy()
    b[list(flipped)] ^= np.uint32(2**31)
    check_tells_apart(a, b)


def test_a_weighted_sum_would_miss_two_flipped_signs() -> None:
    """Odd weights detect every change of one word, but not two flipped signs."""

    def weighted_sum(words: jax.Array) -> jax.Array:
        return jnp.sum(words * (2 * jnp.arange(SIZE, dtype="uint32") + 1), dtype="uint32")

    a, flipped = np.arange(SIZE, dtype="uint32"), np.array([2**31] * 2 + [0] * 4, "uint32")
    check_tells_apart(a, a ^ flipped)
    with pytest.raises(AssertionError):
        check_tells_apart(a, a ^ flipped, weighted_sum)


@pytest.mark.large
def test_verification_costs_less_than_a_hundredth_of_a_step():
    """Default job on 2 devices, with the default --verify-every; medians of one interleaved run."""
    config = TrainConfig()
    dataset, replicas = datasets.load(config), Replicas(prepare(2, "cpu"))
    ddp = DistributedDataParallel(models.build(config, dataset), optim.adam(), replicas=replicas)
    loader = Loader(dataset.train, replicas, global_batch_size=config.global_batch_size)
    state = ddp.init()
    step_seconds, verify_seconds = [], []
    for epoch in range(12):
        started = time.perf_counter()
        for batches in loader.epoch(epoch):
            state, _ = ddp.steps(state, batches)
        jax.block_until_ready(state)
        trained = time.perf_counter()
        ddp.verify(state)
        step_seconds.append((trained - started) / loader.steps_per_epoch)
        verify_seconds.append(time.perf_counter() - trained)
    share = statistics.median(verify_seconds) / config.verify_every / statistics.median(step_seconds)
    assert 0 < share < 0.01  # [0.004]
