"""DDP from scratch example: all claims hold in both frameworks, and fail for planted mistakes."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.arrays import furthest
from examples.from_scratch import claims, in_jax, in_torch, loops, problem, skeleton
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


def test_the_check_names_parameter_rank_and_difference(of_jax: Measured) -> None:
    assert of_jax.refusal.startswith("layers.0.") and "on rank 1 differs from rank 0's by up to 0." in of_jax.refusal


def test_a_loop_that_steps_on_the_first_steps_after_one_micro_batch_and_leaves_three_over(of_jax: Measured) -> None:
    assert of_jax.taken == [4, 4, 4, 4, 4, 0] and of_jax.taken_on_first == [1, 4, 4, 4, 4, 3]


def test_both_frameworks_report_the_same_places(replicas: Replicas, torch_run: TorchRun) -> None:
    assert in_jax.places(replicas) == torch_run[0] == [skeleton.Place(rank, rank, 2) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("together", 1e-300, "with synchronisation they stay equal"),
        ("refusal", "", "replicas with two seeds are refused"),
        ("real", 1e-9, "SimpleDDP equals DistributedDataParallel"),
        ("both", 1e-16, "nor with both mistakes"),
    ],
)
def test_a_claim_fails_if_either_framework_is_wrong(
    of_jax: Measured, of_torch: Measured, name: str, value: object, claim: str
) -> None:
    wrong = dataclasses.replace(of_jax, **{name: value})
    for sides in ((wrong, of_torch), (of_torch, wrong)):
        failing = [one.says for one in claims.claims(*sides) if not one.holds]
        assert len(failing) == 1 and failing[0].startswith(claim)


def test_summed_gradients_lead_to_other_parameters(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_jax, "all_reduce_mean", all_reduce)
    monkeypatch.setattr(in_jax, "_programs", in_jax._programs.__wrapped__)  # none that was compiled before
    with jax.enable_x64(True):
        placed = list(map(replicas.shard, problem.batches()))
        summed = loops.train(in_jax.simple(replicas, (0, 0), problem.CONFIG.base_lr), placed)
        difference = furthest(summed.parameters(), in_jax.real(replicas, placed))
        assert summed.distance == 0  # equal replicas need not be right
    assert difference > problem.PLAIN


class Gaps(skeleton.Skeleton):
    """Replicas with given gaps and nothing else."""

    backward = average_gradients = step = parameters = wait = None  # type: ignore[assignment]

    def __init__(self, **gaps: list[float]):
        self._known = gaps

    def gaps(self) -> dict[str, list[float]]:
        return self._known


def test_the_check_names_the_largest_difference_or_a_nan() -> None:
    Gaps(a=[0, 0, 0], b=[0, 0, 0]).check_replicas()
    with pytest.raises(TrainingError, match=r"^b on rank 2 differs from rank 0's by up to 0.5;"):
        Gaps(a=[0, 0.1, 0], b=[0, 0, 0.5]).check_replicas()
    with pytest.raises(TrainingError, match=r"^a on rank 1 differs from rank 0's by up to inf;"):
        Gaps(a=[0, np.nan, 0], b=[0, 0, 0.5]).check_replicas()
