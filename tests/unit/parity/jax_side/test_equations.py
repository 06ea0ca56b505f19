"""The program of a jax loss is read equation by equation, with results, numbers and lines."""

from collections.abc import Iterator
from typing import Any

import equinox
import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax import numpy as jnp

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.jax_side import equations
from jaxddp.parity.jax_side.value_graph import read
from jaxddp.parity.operations import Operation, Results, are_near, moments

X = np.arange(6.0).reshape(2, 3) - 2.5


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def named(program: tuple[Operation, ...], name: str) -> list[Operation]:
    return [one for one in program if one.name == name]


def summed(body: Any) -> Any:
    return lambda x: jnp.sum(body(x))


@pytest.mark.parametrize(
    "wrapped",
    [jax.jit, jax.checkpoint, lambda f: lambda x: lax.cond(x.sum() < 0, f, f, x)],
    ids=["jit", "checkpoint", "cond"],
)
def test_equations_inside_of_a_call_are_read_except_of_a_branch(wrapped: Any) -> None:
    program = read(summed(wrapped(lambda x: jnp.tanh(3.0 * x))), [X])
    inside = named(program, "tanh")
    if wrapped in (jax.jit, jax.checkpoint):
        assert are_near(inside[0].results[0], moments(np.tanh(3 * X)))
        assert named(program, "mul")[0].numbers == (3.0,)
    else:
        assert not inside and named(program, "cond")


@pytest.mark.parametrize(
    "reduced",
    [
        lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2), (1, 1), "VALID"),
        lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
    ],
    ids=["window", "axis"],
)
def test_a_reduction_by_a_function_is_one_equation(reduced: Any) -> None:
    assert are_near(read(summed(reduced), [X])[-1].results[0], moments(np.asarray(reduced(X).sum())[None]))


def test_a_scan_is_unrolled_and_keeps_its_order() -> None:
    def loss(x: jax.Array) -> jax.Array:
        carry, rows = lax.scan(lambda c, row: (0.5 * c + row.sum(), c + 1), 0.0, x, reverse=True)
        return carry + rows.sum()

    program = read(loss, [X])
    assert len(named(program, "scan")) == 0
    stacked = named(program, "stack")[0]
    expected = lax.scan(lambda c, row: (0.5 * c + row.sum(), c + 1), 0.0, X, reverse=True)[1]
    assert are_near(stacked.results[0], moments(np.asarray(expected)))


def test_a_long_scan_stays_one_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equations, "MOST", 3)
    program = read(lambda x: lax.scan(lambda c, row: (c + row.sum(), None), 0.0, x)[0], [X])
    assert len(named(program, "scan")) == 1


def test_moments_of_a_large_result_are_those_of_all_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = read(summed(jnp.exp), [X])
    monkeypatch.setattr(equations, "LARGE", 2)
    in_program = read(summed(jnp.exp), [X])
    for one, other in zip(exact, in_program, strict=True):
        np.testing.assert_allclose(one.results[0], other.results[0], rtol=1e-13)  # measured: 2e-16


def test_random_keys_are_no_numbers() -> None:
    key = jax.random.key(0)
    program = read(lambda x: jnp.sum(x * jax.random.normal(jax.random.fold_in(key, 3), x.shape)), [X])
    assert named(program, "mul") and all(np.isfinite(one.numbers).all() for one in named(program, "mul"))


def test_a_loss_with_a_collective_is_read_for_one_replica() -> None:
    program = read(lambda x: lax.pmean(jnp.sum(x), AXIS_NAME), [X])
    assert are_near(program[0].results[0], moments(X.sum()))


def test_lines_are_the_users_through_jaxs_functions() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x, axis=0)[0, 0]  # this line

    lines = {str(one.line) for one in read(loss, [X]) if one.line is not None and "this line" in one.line.text}
    assert len(lines) == 1 and lines.pop().startswith("test_equations.py:")


def test_lines_of_a_scans_body_have_their_callers() -> None:
    def cell(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry + jnp.sin(x), None  # the body

    def layer(x: jax.Array) -> jax.Array:
        return lax.scan(cell, jnp.zeros(3), x)[0]  # the layer

    program = read(lambda x: jnp.sum(layer(x)), [X])
    lines = {(one.line, *one.callers) for one in named(program, "sin") if one.line}
    ((body, of_layer, _),) = lines
    assert body.text.endswith("# the body") and of_layer.text.endswith("# the layer")


@pytest.mark.parametrize("other", [[1.0, 2.0, 3.5], [1.0, 2.0], [1.0, 2.0, np.inf], [3.0, 3.0, 0.0]])
def test_other_values_are_not_near(other: list[float]) -> None:
    known = Results((Operation("x", (), (), None, (moments(np.array([1.0, 2.0, 3.0])),)),))
    for values, expected in ((np.array([3.0, 1.0, 2.0]), True), (np.array(other), False)):
        assert known.has(Operation("y", (), (), None, (moments(values),))) == expected


@pytest.mark.parametrize("masked", [-np.inf, -1e9, float(np.finfo(np.float64).min)])
def test_values_of_masks_are_near_each_other_and_hide_no_other_value(masked: float) -> None:
    infinite, scores = moments(np.array([0.5, -np.inf, 2.0])), np.array([0.5, masked, 2.0])
    assert are_near(infinite, moments(scores))
    assert not are_near(infinite, moments(scores + np.array([1e-3, 0.0, 0.0])))


def of_nnx() -> tuple[Any, Any]:
    layer = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, state)(x))  # of a user

    return loss, state


def of_linen() -> tuple[Any, Any]:
    layer = linen.LayerNorm()

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer.apply(variables, x))  # of a user

    return loss, layer.init(jax.random.key(0), X)


def of_equinox() -> tuple[Any, Any]:
    arrays, rest = equinox.partition(equinox.nn.LayerNorm((2, 3)), equinox.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(equinox.combine(arrays, rest)(x))  # of a user

    return loss, arrays


def of_optax() -> tuple[Any, Any]:
    def loss(logits: Any, x: jax.Array) -> jax.Array:
        return optax.losses.huber_loss(logits, x).sum()  # of a user

    return loss, 2 * X


@pytest.mark.parametrize("make", [of_nnx, of_linen, of_equinox, of_optax])
def test_lines_are_the_users_through_layers_of_libraries(make: Any) -> None:
    loss, params = make()
    lines = [one.line for one in read(loss, [params, X]) if one.line is not None]
    assert lines and all("# of a user" in line.text for line in lines), lines
