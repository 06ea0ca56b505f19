"""Training with dropout against torch DDP with the same masks, in every stage of every step."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxddp.nn import layers
from jaxddp.nn.dropout_rng import Place
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import Case
from jaxddp.parity.jax_side.checked_step import forget_programs
from jaxddp.step import local_gradients
from tests.support.cases import even_case
from tests.support.trajectories import compare, run_jax

TOLERANCE = 1e-12  # float64; measured: up to 4.2e-15
FAULT = 0.1  # smallest difference of the local gradients that a planted fault must cause; measured: 0.29
Both = Callable[[Case], tuple[Trajectory, Trajectory]]


def case_of(masks: str = "replica", world_size: int = 2, model: str = "mlp", **options: Any) -> Case:
    config = {"dropout": 0.3, "dropout_masks": masks, "accumulation_steps": 2, **options}
    return even_case(model, "sgd", world_size, steps=5, **config)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("masks", "world_size", "model"),
    [
        *[("replica", 2, "mlp"), ("shared", 2, "mlp"), ("example", 4, "mlp"), ("replica", 4, "mlp")],
        *[("shared", 4, "mlp"), ("example", 2, "mlp"), ("replica", 4, "char_mlp"), ("replica", 4, "convnet")],
    ],
)
def test_steps_with_dropout_equal_torchs(masks: str, world_size: int, model: str, run_both: Both) -> None:
    comparison = compare(*run_both(case_of(masks, world_size, model)), TOLERANCE)
    assert comparison.equal, comparison


def check_detected(ours: Trajectory, theirs: Trajectory) -> None:
    comparison = compare(ours, theirs, TOLERANCE)
    assert comparison.first is not None and comparison.first[0] == "local_loss" and comparison.first[1].step == 1
    assert comparison.worst["local_gradients"].value > FAULT


@pytest.mark.large
@pytest.mark.parametrize("wrong", [{"masks": "shared"}, {"seed": 1}], ids=["shared", "seed"])
def test_other_masks_are_detected(wrong: dict[str, Any], run_both: Both) -> None:
    case, theirs = case_of(), run_both(case_of())[1]
    check_detected(run_jax(case_of(**wrong), theirs.start, batches=case.batches()), theirs)


def without_rescaling(self: layers.Dropout, x: jax.Array) -> jax.Array:
    return RESCALED(self, x) * (1 - self.p)


RESCALED = layers.Dropout.__call__
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "one step late": (local_gradients, "Place", lambda step, first: Place(step + 1, first)),
    "same mask in every micro-batch": (local_gradients, "Place", lambda step, first: Place(step, 0 * first)),
    "not rescaled": (layers.Dropout, "__call__", without_rescaling),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_detected(fault: str, run_both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = run_both(case_of())[1]
    monkeypatch.setattr(*FAULTS[fault])
    forget_programs()
    check_detected(run_jax(case_of(), theirs.start), theirs)
    forget_programs()
