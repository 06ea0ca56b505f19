"""Find the line of a schedule: the user's last one that computes a scalar of an update."""

import optax
import pytest
from jax import numpy as jnp

from jaxddp.parity.jax_side.optimizer_line import idle_lines, line_of_schedule
from jaxddp.parity.jax_side.value_graph import graph_of

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


def warmed_up(count):  # type: ignore[no-untyped-def]
    falling = jnp.cos(0.1 * count)  # after the warm-up
    rising = (count + 1) / 4  # in it
    return jnp.where(count < 4, rising, falling)


@pytest.mark.parametrize(("count", "idle"), [(2.0, "# after the warm-up"), (5.0, "# in it")])
def test_lines_of_a_branch_that_is_not_taken_are_idle(count: float, idle: str) -> None:
    (line,) = idle_lines(graph_of(warmed_up, [jnp.asarray(count)]))
    assert line.text.endswith(idle)
