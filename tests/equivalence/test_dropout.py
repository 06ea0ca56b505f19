"""Training with dropout: torch DDP with the same masks takes the same steps, stage by stage."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxddp.nn import layers
from jaxddp.nn.dropout_rng import Place
from jaxddp.parity.cases import Case
from jaxddp.parity.flax_side.run import forget_programs
from jaxddp.parity.question import Trajectory
from jaxddp.step import local_gradients
from tests.support.cases import even_case
from tests.support.trajectories import compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 4.2e-15
FAULT = 0.1  # of the local gradients, with a planted fault, at least; measured: 0.29
Both = Callable[[Case], tuple[Trajectory, Trajectory]]


def case(masks: str = "replica", world_size: int = 2, model: str = "mlp", **options: Any) -> Case:
    asked = {"dropout": 0.3, "dropout_masks": masks, "accumulation_steps": 2, **options}
    return even_case(model, "sgd", world_size, steps=5, **asked)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("masks", "world_size"),
    [
        *[("replica", 2), ("shared", 2), ("example", 4)],
        *[pytest.param(*large, marks=pytest.mark.large) for large in (("replica", 4), ("shared", 4), ("example", 2))],
    ],
)
def test_the_steps_are_torchs(masks: str, world_size: int, run_both: Both) -> None:
    comparison = compare(*run_both(case(masks, world_size)), TOLERANCE)
    assert comparison.equal, comparison


@pytest.mark.large
@pytest.mark.parametrize("model", ["char_mlp", pytest.param("convnet", marks=pytest.mark.large)])
def test_the_steps_of_other_models_are_torchs(model: str, run_both: Both) -> None:
    comparison = compare(*run_both(case(world_size=4, model=model)), TOLERANCE)
    assert comparison.equal, comparison


def check_noticed(ours: Trajectory, theirs: Trajectory) -> None:
    comparison = compare(ours, theirs, TOLERANCE)
    assert comparison.first is not None and comparison.first[0] == "local_loss" and comparison.first[1].step == 1
    assert comparison.worst["local_gradients"].value > FAULT


def test_shared_masks_would_be_noticed(run_both: Both) -> None:
    check_noticed(run_both(case("shared"))[0], run_both(case("replica"))[1])


@pytest.mark.large
def test_another_seed_would_be_noticed(run_both: Both) -> None:
    asked, theirs = case(), run_both(case())[1]
    check_noticed(run_jax(case(seed=1), theirs.start, batches=asked.batches()), theirs)


def unscaled(self: layers.Dropout, x: jax.Array) -> jax.Array:
    return SCALED(self, x) * (1 - self.p)


SCALED = layers.Dropout.__call__
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a step late": (local_gradients, "Place", lambda step, first: Place(step + 1, first)),
    "each micro-batch the same": (local_gradients, "Place", lambda step, first: Place(step, 0 * first)),
    "not scaled": (layers.Dropout, "__call__", unscaled),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_noticed(fault: str, run_both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = run_both(case())[1]
    monkeypatch.setattr(*FAULTS[fault])
    forget_programs()
    check_noticed(run_jax(case(), theirs.start), theirs)
    forget_programs()
