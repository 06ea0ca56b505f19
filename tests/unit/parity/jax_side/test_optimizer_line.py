"""Find the line of a schedule: the user's last one that computes a scalar of an update."""

import optax
import pytest
from jax import numpy as jnp

from jaxddp.parity.jax_side.optimizer_line import line_of_schedule

PARAMS = {"w": jnp.ones(3)}


def rate(count):  # type: ignore[no-untyped-def]
    share = jnp.minimum(count, 4) / 4
    return 0.1 * share  # this line


def scaled(updates, params):  # type: ignore[no-untyped-def]
    return {"w": 2.0 * updates["w"]}  # no schedule


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(rate),
        optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(rate)),
        optax.partition({"all": optax.adam(rate)}, lambda params: dict.fromkeys(params, "all")),
        optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
    ],
    ids=["sgd", "chain", "partition", "inject_hyperparams"],
)
def test_the_schedule_of_a_user_has_its_line(optimizer: optax.GradientTransformation) -> None:
    line = line_of_schedule(optimizer, PARAMS)
    assert line is not None and line.text.endswith("# this line")


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.adam(optax.linear_schedule(0.1, 0.0, 9)), optax.stateless(scaled)]
)
def test_other_updates_have_none(optimizer: optax.GradientTransformation) -> None:
    assert line_of_schedule(optimizer, PARAMS) is None
