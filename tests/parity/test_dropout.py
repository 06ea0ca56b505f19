"""Training with dropout: torch DDP with the same masks takes the same steps, stage by stage."""

from typing import Any

import pytest
from cases import make_case
from trajectories import Comparison, compare, run_jax

from jaxddp.choices import DROPOUT_MASKS
from jaxddp.parity.run_torch import TorchPool

TOLERANCE = 1e-12  # float64; measured:
FAULT = 1e-2  # of the local gradients, with a planted fault, at least; measured:
STEPS = 6


def case(masks: str, world_size: int = 2, model: str = "mlp", **options: Any) -> Any:
    asked = {"dropout": 0.3, "dropout_masks": masks, "accumulation_steps": 2, **options}
    return make_case(model, "sgd", world_size, steps=STEPS, **asked)


def compared(ours: Any, theirs: Any, pool: TorchPool) -> Comparison:
    weights = theirs.initial_weights()
    return compare(run_jax(ours, weights), pool.run(theirs, weights), TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("masks", DROPOUT_MASKS)
def test_the_steps_are_torchs(masks: str, world_size: int, pool: TorchPool) -> None:
    asked = case(masks, world_size)
    comparison = compared(asked, asked, pool)
    print(comparison)
    assert comparison.equal, comparison


@pytest.mark.parametrize("model", ["char_mlp", "convnet"])
def test_the_steps_of_other_models_are_torchs(model: str, pool: TorchPool) -> None:
    asked = case("replica", model=model)
    comparison = compared(asked, asked, pool)
    print(comparison)
    assert comparison.equal, comparison
