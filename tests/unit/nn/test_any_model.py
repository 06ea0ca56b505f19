"""Optimizers of the jax side, in every form that a program may have them."""

from typing import Any

import optax
import pytest
from flax import nnx

from jaxddp.errors import InputError
from jaxddp.nn.any_model import functional_of, transformation_of

MODEL = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        nnx.Optimizer(MODEL, SGD, wrt=nnx.Param),
        nnx.ModelAndOptimizer(MODEL, SGD, wrt=nnx.Param),
        lambda model: SGD,
        lambda model: nnx.Optimizer(model, SGD, wrt=nnx.Param),
    ],
)
def test_its_optax_transformation_is_found(optimizer: Any) -> None:
    assert transformation_of(optimizer, MODEL) is SGD


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (nnx.Optimizer(MODEL, SGD, wrt=nnx.Variable), "its wrt is Variable; must be nnx.Param"),
        (lambda model: nnx.Optimizer(model, SGD, wrt=nnx.PathContains("bias")), "its wrt is PathContains.*; must be"),
        (lambda model: 0.1, "must return an optax transformation or an nnx.Optimizer, and returns float"),
    ],
)
def test_any_other_is_refused_by_name(optimizer: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^flax_optimizer: {message}"):
        transformation_of(optimizer, MODEL)


@pytest.mark.parametrize("parts", [nnx.state(MODEL), nnx.split(MODEL)])
def test_the_parts_of_an_nnx_module_are_no_model(parts: Any) -> None:
    with pytest.raises(InputError, match=r"^flax_model: must return the nnx module itself, not its (State|tuple)"):
        functional_of(parts, lambda model, batch: 0.0, dict)
