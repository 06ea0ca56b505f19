"""Lines of a port's functions, and of the collective that averages its gradients."""

from functools import wraps

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from jaxddp.parity.jax_side.port_lines import collectives, size_of
from jaxddp.parity.user_code.homes import line_of_function

AXES = [("replica", 2)]


def doubled(function):  # type: ignore[no-untyped-def]
    @wraps(function)
    def call(x: jax.Array) -> jax.Array:
        return 2 * function(x)

    return call


@doubled
def decorated(x: jax.Array) -> jax.Array:
    return x + 1


def test_the_line_of_a_function_is_that_of_its_def() -> None:
    line = line_of_function(decorated)
    assert line is not None and line.text == "def decorated(x: jax.Array) -> jax.Array:"
    assert line_of_function(jax.jit(decorated)) == line
    assert line_of_function(jnp.mean) is line_of_function(None) is line_of_function(3) is None


@pytest.mark.parametrize(
    "inside",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: lax.scan(lambda c, y: (c, f(y)), 0, x[None])[1]],
)
def test_collectives_are_found_in_any_equation(inside) -> None:  # type: ignore[no-untyped-def]
    def step(x: jax.Array) -> jax.Array:
        return lax.psum(x, "replica") + lax.pmax(x.sum(), "replica") + lax.all_gather(x[:1], "replica").sum()

    program = jax.make_jaxpr(inside(step), axis_env=AXES)(jnp.ones(5))
    assert sorted(map(size_of, collectives(program.jaxpr))) == [1, 5]  # the largest value is no mean of gradients
    assert not [*collectives(jax.make_jaxpr(jnp.sin)(1.0).jaxpr)]
