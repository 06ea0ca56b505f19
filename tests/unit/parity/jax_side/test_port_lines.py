"""Lines of a port's functions, and of the collective that averages its gradients."""

import runpy
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from jaxddp.parity.jax_side.port_lines import BatchLines, collectives, size_of
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


BATCHES = """\
import numpy as np

calls = []


def data(scale):
    return scale * np.random.default_rng(0).normal(size=(4, 2))


def jax_batch(step, rank):
    return {"x": data(2.0) + rank}


def torch_batch(step, rank):
    return {"x": data(3.0) + rank}


def other_batch(step, rank):
    calls.append(step)
    return {"x": data(2.0) + len(calls)}
"""


@pytest.mark.parametrize(
    ("jax_batch", "torch_batch", "lines"),
    [
        ("jax_batch", "torch_batch", (11, 15)),  # line 7 makes no difference: both run it
        ("jax_batch", "jax_batch", (None, None)),  # they are equal
        ("other_batch", "torch_batch", (None, None)),  # it gives something else when it is called again
        ("jax_batch", "none", (None, None)),
    ],
)
def test_batches_are_followed_line_by_line(
    jax_batch: str, torch_batch: str, lines: tuple[int | None, ...], tmp_path: Path
) -> None:
    path = tmp_path / "data.py"
    path.write_text(BATCHES)
    functions = runpy.run_path(str(path))
    port = SimpleNamespace(jax_batch=functions[jax_batch], torch_batch=functions.get(torch_batch))
    case: Any = SimpleNamespace(port=port, world_size=2)
    assert tuple(line and line.number for line in BatchLines(case, 0).run(lambda job: None)) == lines
