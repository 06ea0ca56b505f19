"""Ring example: ring and collectives are right in both frameworks, and the tables show them."""

import copy

import jax
import numpy as np
import pytest

from examples.ring import in_torch, measured
from examples.ring.__main__ import Options
from examples.ring.measured import Results
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError

pytestmark = pytest.mark.large

WORLD_SIZE = 3  # the smallest with partial sums in both halves of the ring
SUMS, STEPS, SHARE, PADDED, HALF, WHOLE, COLLECTIVES = range(7)


@pytest.fixture(scope="module")
def ours() -> Results:
    return measured.of_jax(Replicas(jax.devices()[:WORLD_SIZE]))


@pytest.fixture(scope="module")
def theirs() -> Results:
    return measured.of_torch(WORLD_SIZE)


def failing(ours: Results, theirs: Results) -> list[int]:
    return [number for number, claim in enumerate(measured.claims(ours, theirs)) if not claim.holds]


def test_claims_fail_for_a_ring_that_stops_halfway(ours: Results, theirs: Results) -> None:
    """Stop after N-1 steps, without the all-gather."""
    halfway = copy.deepcopy(ours)
    for of in halfway["ring"].values():
        of["ring"] = of["steps"][:, WORLD_SIZE - 1].reshape(WORLD_SIZE, -1)[:, : of["ring"].shape[1]]
    assert failing(halfway, theirs) == [SUMS]
    assert measured.ring_error(halfway) > 0.3  # measured: 0.9


def test_claims_fail_for_a_chunk_sent_twice(ours: Results, theirs: Results) -> None:
    wasteful = copy.deepcopy(theirs)
    wasteful["ring"]["even"]["bytes"] += 8
    assert failing(ours, wasteful) == [SHARE]


def test_claims_fail_for_a_collective_with_another_result(ours: Results, theirs: Results) -> None:
    wrong = copy.deepcopy(theirs)
    wrong["collectives"]["all_to_all"] = wrong["collectives"]["all_to_all"].swapaxes(0, 1) + 1
    assert failing(ours, wrong) == [COLLECTIVES]
    assert measured.different(ours["collectives"], wrong["collectives"]) == ["all_to_all"]


def test_torchs_ring_pads_the_last_chunk() -> None:
    ring = in_torch.Ring(in_torch.World(rank=1, world_size=2))
    chunks = ring.in_chunks(in_torch.torch.ones(3))
    np.testing.assert_array_equal(chunks, [[1, 1], [1, 0]])
    assert [ring.chunk(offset) for offset in (-1, 0, 1)] == [0, 1, 0]


@pytest.mark.parametrize("replicas", [1, 6])
def test_fewer_than_2_or_more_than_5_replicas_are_refused(replicas: int) -> None:
    with pytest.raises(InputError, match=f"--devices {replicas}: must be 2 to 5"):
        Options(replicas)
