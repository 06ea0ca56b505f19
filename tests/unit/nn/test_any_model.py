"""Optimizers of the jax side, in every form that a program may have them."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn.any_model import functional_of, transformation_of
from jaxddp.nn.functional import Functional

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
    with pytest.raises(InputError, match=f"^jax_optimizer: {message}"):
        transformation_of(optimizer, MODEL)


@pytest.mark.parametrize("parts", [nnx.state(MODEL), nnx.split(MODEL)])
def test_the_parts_of_an_nnx_module_are_no_model(parts: Any) -> None:
    with pytest.raises(InputError, match=r"^jax_model: must return the nnx module itself, not its (State|tuple)"):
        functional_of(parts, lambda model, batch: 0.0, dict)


class Scaled(nnx.Module):
    def __init__(self) -> None:
        self.weight, self.scale, self.calls = nnx.Param(jnp.ones(2)), np.arange(2.0), jnp.zeros(())


def test_an_array_of_an_nnx_module_that_is_no_variable_stays_as_built() -> None:
    functional = functional_of(Scaled(), lambda model, batch: 0.0, dict)
    assert isinstance(functional, Functional) and functional.shapes == {"weight": (2,)}
    loss = functional.local_loss(lambda model, batch: model.weight * model.scale + batch["x"], train=True)
    sums, buffers = loss(functional.params, functional.buffers, {"x": jnp.ones(2)})
    assert float(sums["loss"]) == 3 and not buffers


def test_one_that_a_loss_changes_is_refused_by_name() -> None:
    def counting(model: Scaled, batch: Any) -> Any:
        model.calls = model.calls + 1
        return model.weight * batch["x"]

    loss = Functional(Scaled()).local_loss(counting, train=True)
    with pytest.raises(InputError, match=r"^calls: an array that changes must be an nnx.Variable of the module$"):
        loss({"weight": jnp.ones(2)}, {}, {"x": jnp.ones(2)})
