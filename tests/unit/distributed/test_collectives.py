"""What the collectives send: integers as floats, small arrays as one, and nothing from a single replica."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed import collectives
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.plan.messages import Messages, all_reduces

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def integers(dtype: str) -> np.ndarray:
    """Return different integers for four replicas, with the extremes among those of each."""
    ends = np.iinfo(dtype)
    drawn = np.random.default_rng(0).integers(ends.min, ends.max, (4, 5), dtype=dtype, endpoint=True)
    return np.concatenate([drawn, np.tile(np.array([ends.min, ends.max, 0], dtype), (4, 1))], axis=1)


def broadcast_from_2(tree: Any) -> Any:
    return collectives.broadcast(tree, src=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_broadcast_changes_no_bit(dtype: str | None) -> None:
    """The pieces of integers must fit the floats beside them, of which bfloat16 holds few; alone they are not split."""
    tree = {name: integers(name) for name in INTEGERS} | {"bool": np.arange(12).reshape(4, 3) % 5 == 0}
    if dtype is not None:
        tree["float"] = np.random.default_rng(1).normal(size=(4, 3)).astype(jnp.dtype(dtype))
    replicas = Replicas(jax.devices()[:4])
    received = replicas.map(broadcast_from_2, in_axes=(0,), out_axes=0)(replicas.shard(tree))
    for name, values in tree.items():
        assert received[name].dtype == values.dtype
        np.testing.assert_array_equal(received[name], np.stack([values[2]] * 4))


def test_counters_travel_with_gradients_and_buffers() -> None:
    """In int32, a counter would need a second all-reduce."""
    replicas = Replicas(jax.devices()[:4])
    tree = {
        "gradient": np.ones((4, 5), np.float32),
        "mean": np.ones((4, 3), np.float32),
        "count": np.ones((4,), np.int32),
    }

    def step(tree: Any) -> Any:
        buffers = {name: tree[name] for name in ("mean", "count")}
        return collectives.all_reduce_mean(tree["gradient"]), collectives.broadcast(buffers)

    compiled = replicas.map(step, in_axes=(0,), out_axes=0).lower(replicas.shard(tree)).compile()
    assert all_reduces(compiled.as_text()) == Messages(count=1, bytes=4 * (5 + 3 + 2))


def test_small_arrays_are_sent_as_one() -> None:
    """The replicas meet once for each array; the sums are those of each array alone, also across chunks."""
    rng, replicas = np.random.default_rng(0), Replicas(jax.devices()[:4])
    shapes = ((), (3,), (5, 4), (2**14 + 1,), (2**14,))  # the last is the largest that is joined
    tree = {dtype: [rng.normal(size=(4, *s)).astype(jnp.dtype(dtype)) for s in shapes] for dtype in ("f4", "bfloat16")}
    mapped = replicas.map(collectives.all_reduce, in_axes=(0,), out_axes=0)
    received = mapped(replicas.shard(tree))
    for ours, leaf in zip(jax.tree.leaves(received), jax.tree.leaves(tree), strict=True):
        assert ours.dtype == leaf.dtype
        alone = replicas.map(lambda x: lax.psum(x, collectives.AXIS_NAME), in_axes=(0,), out_axes=0)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(alone(replicas.shard(leaf))))
    # float32: all but the one that is too large; bfloat16: all.
    assert str(jax.make_jaxpr(mapped)(tree)).count(" psum") == 3


def test_a_single_replica_sends_nothing() -> None:
    """XLA would keep the all-reduce, which took a third of the default job's step."""
    tree = {"float": np.array([[1.5, -0.0]], np.float32), "int": np.array([[3]], np.int32), "bool": np.array([[True]])}

    def collect(tree: Any) -> Any:
        sums = collectives.all_reduce(tree)
        return {"sum": sums, "mean": collectives.all_reduce(tree, "mean"), "first": collectives.broadcast(tree)}

    on_device, on_virtual = Replicas(jax.devices()[:1]), VirtualReplicas(1)
    mapped = on_device.map(collect, in_axes=(0,), out_axes=0)
    received = mapped(on_device.shard(tree))
    expected = on_virtual.map(collect, in_axes=(0,), out_axes=0)(on_virtual.shard(tree))
    assert jax.tree.map(lambda leaf: leaf.dtype, received) == jax.tree.map(lambda leaf: leaf.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, received, expected)
    compiled = mapped.lower(on_device.shard(tree)).compile()
    assert all_reduces(compiled.as_text()) == Messages(count=0, bytes=0)


def test_of_one_virtual_replica_values_are_equal_on_all() -> None:
    replicas = VirtualReplicas(1)
    mean = replicas.map(collectives.all_reduce_mean, in_axes=(0,), out_axes=None)
    assert mean(replicas.shard(np.array([[2.0, 3.0]], np.float32))).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_sum_over_virtual_replicas_is_no_reduction_and_has_its_gradient(world_size: int) -> None:
    """On CPU, XLA's library for reductions would copy the terms of all replicas."""

    def squared(x: jax.Array) -> jax.Array:
        return jnp.sum(collectives.all_reduce(x) ** 2)

    x = np.random.default_rng(0).normal(size=(world_size, 3)).astype(np.float32)
    of_kinds = []
    for replicas in (VirtualReplicas(world_size), Replicas(jax.devices()[:world_size])):
        sums = replicas.map(collectives.all_reduce, in_axes=(0,), out_axes=0)
        gradients = replicas.map(jax.grad(squared), in_axes=(0,), out_axes=0)
        of_kinds.append((sums(replicas.shard(x)), gradients(replicas.shard(x))))
        assert "stablehlo.reduce" not in sums.lower(x).as_text() or isinstance(replicas, Replicas)
    # measured: 2e-7
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *of_kinds)
