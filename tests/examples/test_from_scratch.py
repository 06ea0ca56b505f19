"""DDP from scratch: its claims hold in both frameworks, and would not with a mistake in it."""

import dataclasses
import doctest

import jax
import numpy as np
import pytest

from examples.arrays import furthest
from examples.from_scratch import claims, in_jax, in_torch, loops, problem, skeleton
from examples.from_scratch.__main__ import show_places, show_shards, show_times, show_training
from examples.from_scratch.course import Measured
from jaxddp import Replicas, prepare
from jaxddp.distributed.collectives import all_reduce
from jaxddp.errors import TrainingError

pytestmark = pytest.mark.large

TorchRun = tuple[list[skeleton.Place], Measured, dict[str, float]]


@pytest.fixture(scope="module")
def replicas() -> Replicas:
    return Replicas(prepare(2, "cpu"))


@pytest.fixture(scope="module")
def of_jax(replicas: Replicas) -> Measured:
    return in_jax.run(replicas)


@pytest.fixture(scope="module")
def torch_run() -> TorchRun:
    return in_torch.run("cpu")


@pytest.fixture(scope="module")
def of_torch(torch_run: TorchRun) -> Measured:
    return torch_run[1]


def test_the_parts_are_as_documented() -> None:
    found = doctest.testmod(problem)
    assert found.attempted and not found.failed


def test_all_claims_hold(of_jax: Measured, of_torch: Measured) -> None:
    found = claims.claims(of_jax, of_torch)
    assert len(found) == 13 and all(claim.holds for claim in found), found


def test_the_check_names_parameter_rank_and_difference(of_jax: Measured) -> None:
    assert of_jax.refusal.startswith("layers.0.") and "on rank 1 is up to 0." in of_jax.refusal


def test_the_documents_loop_takes_one_micro_batch_first_and_leaves_some_over(of_jax: Measured) -> None:
    assert of_jax.taken == [4, 4, 4, 4, 4, 0] and of_jax.taken_on_first == [1, 4, 4, 4, 4, 3]


def test_both_frameworks_know_who_is_there(replicas: Replicas, torch_run: TorchRun) -> None:
    assert in_jax.places(replicas) == torch_run[0] == [skeleton.Place(rank, rank, 2) for rank in (0, 1)]


def test_everything_is_shown(of_jax: Measured, torch_run: TorchRun, capsys: pytest.CaptureFixture[str]) -> None:
    places, of_torch, times = torch_run
    show_places(places, places)
    show_training(of_jax, of_torch)
    show_shards()
    show_times(times, times)
    shown = capsys.readouterr().out
    assert "1 4 4 4 4   left over 3" in shown
    assert "contiguous [1, 2]    DistributedSampler [2, 2]" in line_with(shown, "31 examples")
    assert min(times.values()) > 0


def line_with(shown: str, words: str) -> str:
    return next(line for line in shown.splitlines() if words in line)


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("together", 1e-300, "with it they stay equal"),
        ("refusal", "", "replicas of two seeds are refused"),
        ("real", 1e-9, "SimpleDDP is DataParallel"),
        ("both", 1e-16, "with both, as in the document"),
    ],
)
def test_a_claim_fails_for_either_side(
    of_jax: Measured, of_torch: Measured, name: str, value: object, claim: str
) -> None:
    wrong = dataclasses.replace(of_jax, **{name: value})
    for sides in ((wrong, of_torch), (of_torch, wrong)):
        failing = [found.says for found in claims.claims(*sides) if not found.holds]
        assert len(failing) == 1 and failing[0].startswith(claim)


def test_gradients_that_are_summed_are_seen(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_jax, "all_reduce_mean", all_reduce)
    monkeypatch.setattr(in_jax, "_programs", in_jax._programs.__wrapped__)  # none that was compiled before
    with jax.enable_x64(True):
        placed = list(map(replicas.shard, problem.batches()))
        summed = loops.train(in_jax.simple(replicas, (0, 0), problem.CONFIG.base_lr), placed)
        found = furthest(summed.parameters(), in_jax.real(replicas, placed))
        assert summed.distance == 0  # replicas that agree need not be right
    assert found > problem.PLAIN


class Gaps(skeleton.Skeleton):
    """Replicas of which only the gaps are known."""

    backward = average_gradients = step = parameters = wait = None  # type: ignore[assignment]

    def __init__(self, **gaps: list[float]):
        self._known = gaps

    def gaps(self) -> dict[str, list[float]]:
        return self._known


def test_the_check_finds_the_furthest_and_what_is_no_number() -> None:
    Gaps(a=[0, 0, 0], b=[0, 0, 0]).check_replicas()
    with pytest.raises(TrainingError, match=r"^b on rank 2 is up to 0.5 away"):
        Gaps(a=[0, 0.1, 0], b=[0, 0, 0.5]).check_replicas()
    with pytest.raises(TrainingError, match=r"^a on rank 1 is up to inf away"):
        Gaps(a=[0, np.nan, 0], b=[0, 0, 0.5]).check_replicas()
