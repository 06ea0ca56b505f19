"""Replicas mapped by shard_map give the bits of pmap; the equivalence tests with --shard-map do so for whole steps."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jaxddp.distributed.collectives import all_reduce_mean, rank
from jaxddp.distributed.replicas import WAYS, Replicas
from jaxddp.errors import InputError
from jaxddp.parity.case_interface import Trajectory
from tests.equivalence.conftest import assert_same_bits


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shard_map_gives_the_bits_of_pmap(world_size: int) -> None:
    """With axes in a tree, slices that go in and come out, collectives, and a donated argument."""

    def function(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        mean = all_reduce_mean(jnp.sin(x * state["scale"]))
        return {"scale": state["scale"] + mean.sum(), "own": state["own"] * rank() + x.sum()}, x - mean

    axes = {"scale": None, "own": 0}
    given = np.random.default_rng(0).normal(size=(world_size, 3)).astype(np.float32)
    results = []
    for way in WAYS:
        replicas = Replicas(jax.devices()[:world_size], mapped_by=way)
        mapped = replicas.map(function, (axes, 0), (axes, 0), donate=(0,))
        state = {"scale": replicas.replicate(np.float32(1.5)), "own": replicas.shard(given[:, 0])}
        for _ in range(3):
            state, rest = mapped(state, replicas.shard(given))
        results.append(jax.tree.map(np.asarray, (state, rest)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert one.shape == other.shape and one.tobytes() == other.tobytes()


def test_another_way_to_map_is_refused() -> None:
    with pytest.raises(InputError, match=r"^mapped_by vmap: unknown; did you mean pmap\? \(one of pmap, shard_map\)$"):
        Replicas(jax.devices()[:1], mapped_by="vmap")


def test_a_changed_bit_is_noticed() -> None:
    record = {"params": {"weight": np.array([1.0, 2.0])}}
    changed = {"params": {"weight": np.nextafter(record["params"]["weight"], 3.0)}}
    assert_same_bits(Trajectory({}, [record]), Trajectory({}, [record]))
    with pytest.raises(AssertionError, match="step 1, params: weight"):
        assert_same_bits(Trajectory({}, [record]), Trajectory({}, [changed]))
