"""Collectives against torch.distributed, on devices and on virtual replicas; the ring all-reduce against psum."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from jaxddp.distributed import collectives
from jaxddp.distributed.replicas import Replicas, VirtualReplicas
from jaxddp.distributed.ring_all_reduce import ring_all_reduce, ring_all_reduce_mean, ring_bytes
from jaxddp.errors import InputError
from jaxddp.parity.port import PortFile
from jaxddp.parity.processes import Tell
from jaxddp.parity.workers import Workers
from jaxddp.plan.messages import Messages, permutes
from torch_ref.distributed import World

TOLERANCE = 1e-15  # float64, relative to the largest element; measured: up to 3e-16, as sums have another order
# Name -> collective, options.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"all_reduce {op}": ("all_reduce", {"op": op}) for op in collectives.REDUCTIONS},
    **{f"reduce {op}": ("reduce", {"op": op, "dst": 1}) for op in collectives.REDUCTIONS},
    "reduce to 0": ("reduce", {}),
    "broadcast": ("broadcast", {"src": 1}),
    "all_gather": ("all_gather", {}),
    "gather": ("gather", {"dst": 1}),
    "scatter": ("scatter", {"src": 1}),
    "reduce_scatter": ("reduce_scatter", {}),
    "reduce_scatter mean": ("reduce_scatter", {"op": "mean"}),
    "all_to_all": ("all_to_all", {}),
}


def inputs(world_size: int) -> np.ndarray:
    """Return the inputs of all replicas, (W, W, 3), of which scatter needs W slices."""
    return np.random.default_rng(world_size).normal(1, 1, (world_size, world_size, 3))


HERE = PortFile(__file__)  # file whose lines are named if a rank fails


@dataclass(frozen=True)
class CallAll:
    """Job for torch's ranks: every call of `CALLS`, with a barrier after each."""

    world_size: int
    source: PortFile = HERE

    def run(self, world: World, tell: Tell) -> dict[str, np.ndarray]:
        results = {}
        for name, (call, options) in CALLS.items():
            tell(name)
            mine = torch.from_numpy(inputs(self.world_size)[world.rank].copy())
            results[name] = getattr(world, call)(mine, **options).numpy()
            world.barrier()
        return results


@pytest.fixture(scope="module", params=[2, 3, 4])
def torch_results(request: pytest.FixtureRequest, workers: Workers) -> list[dict[str, np.ndarray]]:
    return workers.torch.do(CallAll(request.param))


@pytest.mark.parametrize("kind", [lambda n: Replicas(jax.devices()[:n]), VirtualReplicas], ids=["devices", "virtual"])
def test_every_collective_returns_torchs_result(
    kind: Callable[[int], Replicas], torch_results: list[dict[str, np.ndarray]]
) -> None:
    replicas = kind(len(torch_results))

    def call_all(x: jax.Array) -> dict[str, jax.Array]:
        return {name: getattr(collectives, call)(x, **options) for name, (call, options) in CALLS.items()}

    with jax.enable_x64(True):
        results = replicas.map(call_all, in_axes=(0,), out_axes=0)(replicas.shard(inputs(len(torch_results))))
        results = jax.device_get(results)
    for name, of_jax in results.items():
        of_torch = np.stack([of_rank[name] for of_rank in torch_results])
        assert of_jax.shape == of_torch.shape, name
        np.testing.assert_allclose(of_jax, of_torch, rtol=0, atol=TOLERANCE * np.abs(of_torch).max(), err_msg=name)


def test_no_two_collectives_have_the_same_result(torch_results: list[dict[str, np.ndarray]]) -> None:
    """Make sure that a collective mistaken for another would show."""
    results = {name: np.stack([of_rank[name] for of_rank in torch_results]).tobytes() for name in CALLS}
    assert len(set(results.values())) == len(results)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(collectives.broadcast, src=2), "broadcast: src 2: must be a rank, 0 to 1"),
        (partial(collectives.gather, dst=-1), "gather: dst -1: must be a rank, 0 to 1"),
        (partial(collectives.all_reduce, op="prod"), "all_reduce: op prod: unknown; did you mean product?"),
        (partial(collectives.reduce_scatter, op="max"), "reduce_scatter: op max: unknown"),
        (collectives.scatter, r"scatter: a leaf of shape \(3,\): must have 2 slices, one per replica"),
        (collectives.all_to_all, r"all_to_all: a leaf of shape \(3,\): must have 2 slices"),
    ],
)
def test_invalid_calls_raise(call: Callable[[Any], Any], message: str) -> None:
    replicas = Replicas(jax.devices()[:2])
    with pytest.raises(InputError, match=message):
        replicas.map(call, in_axes=(0,), out_axes=0)(replicas.shard(np.ones((2, 3))))


def tree(world_size: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {"w": rng.normal(size=(world_size, size, 2)), "b": rng.normal(size=(world_size, 1))}


@pytest.mark.one_in(5, first=4)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.large), 13])  # elements: 3, 9, 27
def test_the_ring_all_reduce_equals_psum(world_size: int, size: int) -> None:
    replicas = Replicas(jax.devices()[:world_size])
    with jax.enable_x64(True):
        x = replicas.shard(tree(world_size, size))
        sums = replicas.map(collectives.all_reduce, in_axes=(0,), out_axes=None)(x)
        ring = replicas.map(ring_all_reduce, in_axes=(0,), out_axes=0)(x)
        mean = replicas.map(ring_all_reduce_mean, in_axes=(0,), out_axes=0)(x)
    for name, expected in jax.device_get(sums).items():
        of_ranks = np.asarray(ring[name])
        assert all(np.array_equal(of_rank, of_ranks[0]) for of_rank in of_ranks)  # the same bits everywhere
        np.testing.assert_allclose(of_ranks[0], expected, rtol=0, atol=1e-15 * world_size)  # measured: 9e-16 at 8
        np.testing.assert_allclose(mean[name][0], expected / world_size, rtol=0, atol=1e-15)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("world_size", "size"), [(2, 10), (3, 12), (4, 13), (8, 64)])
def test_the_ring_all_reduce_sends_its_share_of_the_buffer(world_size: int, size: int) -> None:
    """Read the bytes from the compiled program: 2 (N-1)/N of the buffer, padded to N equal chunks."""
    replicas = Replicas(jax.devices()[:world_size])
    x = replicas.shard(jnp.ones((world_size, size), jnp.float32))
    program = replicas.map(ring_all_reduce, in_axes=(0,), out_axes=0).lower(x).compile().as_text()
    assert permutes(program) == Messages(2 * (world_size - 1), ring_bytes(size, world_size, itemsize=4))
    if size % world_size == 0:
        assert ring_bytes(size, world_size, 4) * world_size == 2 * (world_size - 1) * size * 4
    assert "all-reduce" not in program
