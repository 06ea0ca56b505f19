"""Broadcast: integers that travel as floats arrive as they were, and need no message of their own."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks.hlo import Messages, all_reduces
from jaxddp.distributed import collectives
from jaxddp.distributed.replicas import Replicas

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
