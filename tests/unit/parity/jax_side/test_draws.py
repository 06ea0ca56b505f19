"""Draws of jax: each function's numbers are noted, wherever it is held, and then taken from the batch."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from jax import numpy as jnp
from jax.random import normal as held_normal

from jaxddp.nn.layers import Dropout
from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.draws import draws_of, serving
from jaxddp.parity.port import Port, PortFile
from jaxddp.parity.port.draws import ENTRY, Draw, DrawnPort, Pair, examples_of
from tests.support.small_port import write

KEY = jax.random.key(0)
P = jnp.array([0.2, 0.5, 0.9])


class Layer(nnx.Module):
    """A weight, dropout and a stream of keys."""

    def __init__(self) -> None:
        self.rngs = nnx.Rngs(0)
        self.weight = nnx.Param(jnp.ones(()))
        self.drop = nnx.Dropout(0.25, rngs=self.rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x) + self.rngs.normal(x.shape)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.block = Layer()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block.weight * self.block(x)


class LinenNet(linen.Module):
    """Parameters whose initial values are drawn in their call, dropout, and noise from a stream of its own."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", lambda key: jax.random.normal(key, (3,)))
        x = linen.Dropout(0.25, deterministic=False, name="drop")(linen.Dense(3, name="fc")(x))
        return x * scale[None] + jax.random.normal(self.make_rng("noise"), x.shape)


def port_of(loss: Callable[[Any, Any], Any], model: Callable[[], Any] = Net) -> Port:
    nothing: Any = lambda *_: None  # noqa: E731
    return Port(
        torch_model=nothing,
        torch_loss=nothing,
        jax_model=model,
        jax_loss=loss,
        batch=lambda step, rank: {"x": np.ones((4, 3))},
        optimizer="sgd",
    )


def noted(function: Callable[[], Any]) -> tuple[Draw, ...]:
    """Return the draws of a loss that calls a function."""
    return draws_of(port_of(lambda model, batch: model.block.weight * jnp.sum(function())))


def served(function: Callable[[], Any], value: float) -> Any:
    """Call a function whose draws are this number."""
    results: list[Any] = []

    def loss(model: Any, batch: Any) -> Any:
        results.append(function())
        return jnp.zeros(())

    draws = noted(function)
    port = port_of(loss)
    drawn = DrawnPort(**vars(port), draws=tuple(Pair(draw, draw) for draw in draws), seed=0)
    batch = {f"{ENTRY}{k}": jnp.full(draw.shape, value) for k, draw in enumerate(draws)}
    serving(drawn).jax_loss(None, batch)
    return results[0]


@pytest.mark.parametrize(
    ("function", "kind", "value", "result"),
    [
        (lambda: jax.random.normal(KEY, (3,)), "normal", 2.0, [2.0] * 3),
        (lambda: jax.random.normal(key=KEY, shape=(3,), dtype=jnp.float32), "normal", 2.0, [2.0] * 3),
        (lambda: held_normal(KEY, (3,)), "normal", 2.0, [2.0] * 3),
        (lambda: nnx.Rngs(0).normal((3,)), "normal", 2.0, [2.0] * 3),
        (lambda: nnx.Rngs(0).noise.normal((3,)), "normal", 2.0, [2.0] * 3),
        (lambda: jax.random.uniform(KEY, (3,)), "uniform", 0.25, [0.25] * 3),
        (lambda: jax.random.uniform(KEY, (3,), jnp.float32, 1.0, 3.0), "uniform", 0.25, [1.5] * 3),
        (lambda: jax.random.uniform(KEY, (3,), minval=-1.0), "uniform", 0.25, [-0.5] * 3),
        (lambda: nnx.Rngs(0).uniform((3,)), "uniform", 0.25, [0.25] * 3),
        (lambda: jax.random.bernoulli(KEY, 0.2, (3,)), "bernoulli", 0.3, [False] * 3),
        (lambda: jax.random.bernoulli(KEY, shape=(3,)), "bernoulli", 0.3, [True] * 3),
        (lambda: jax.random.bernoulli(KEY, P), "bernoulli", 0.3, [False, True, True]),
        (lambda: nnx.Rngs(0).bernoulli(0.2, (3,)), "bernoulli", 0.3, [False] * 3),
        (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))(P), "bernoulli", 0.3, [0.4, 1.0, 1.8]),
    ],
)
def test_each_function_returns_what_the_numbers_make(
    function: Callable[[], Any], kind: str, value: float, result: list[Any]
) -> None:
    assert [(draw.kind, draw.shape, draw.refused) for draw in noted(function)] == [(kind, (3,), "")]
    assert served(function, value).tolist() == pytest.approx(result)


def test_rows_of_probabilities_are_broadcast() -> None:
    assert served(lambda: jax.random.bernoulli(KEY, P, (2, 3)), 0.3).tolist() == [[False, True, True]] * 2


def test_numbers_in_16_bits_are_cast() -> None:
    assert served(lambda: jax.random.normal(KEY, (3,), jnp.bfloat16), 0.1).dtype == jnp.bfloat16


def test_the_functions_are_jaxs_again_after_a_loss() -> None:
    before = jax.random.normal, jax.random.gumbel, nnx.Rngs.normal, nnx.RngStream.bernoulli, held_normal
    noted(lambda: jax.random.normal(KEY, (3,)))
    assert before == (jax.random.normal, jax.random.gumbel, nnx.Rngs.normal, nnx.RngStream.bernoulli, held_normal)
    assert isinstance(jax.random.normal, types.FunctionType)


def test_layers_of_nnx_are_named_and_rates_are_noted() -> None:
    draws = draws_of(port_of(lambda model, batch: model(batch["x"]).mean()))
    assert draws == (Draw("bernoulli", (4, 3), "block.drop", 0.75), Draw("normal", (4, 3), "block"))


@pytest.mark.parametrize("rngs", [{}, {"rngs": {"dropout": KEY, "noise": KEY}}], ids=["without keys", "with keys"])
def test_layers_of_linen_are_named_and_initial_values_are_no_draws(rngs: dict[str, Any]) -> None:
    draws = draws_of(port_of(lambda model, batch: model(batch["x"], **rngs).mean(), LinenNet))
    assert draws == (Draw("bernoulli", (4, 3), "drop", 0.75), Draw("normal", (4, 3)))


def test_a_draw_inside_of_a_derivative_gets_its_numbers() -> None:
    def slope() -> jax.Array:
        return jax.grad(lambda x: x * jax.random.normal(KEY, (3,)).sum())(1.0)

    assert [(draw.shape, draw.refused) for draw in noted(slope)] == [((3,), "")]
    assert served(slope, 2.0) == 6.0


INSIDE: dict[str, Callable[[Callable[[jax.Array], jax.Array]], Any]] = {
    "jit": lambda draw: jax.jit(draw)(KEY),
    "scan": lambda draw: jax.lax.scan(lambda carry, key: (carry, draw(key)), 0, jax.random.split(KEY, 2)),
    "remat": lambda draw: jax.checkpoint(draw)(KEY),
    "vmap": lambda draw: jax.vmap(draw)(jax.random.split(KEY, 2)),
    "jit in grad": lambda draw: jax.grad(lambda x: x * jax.jit(draw)(KEY).sum())(1.0),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_draws_inside_of_other_transformations_are_refused(inside: str) -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        leaves = jax.tree.leaves(INSIDE[inside](lambda key: jax.random.normal(key, (3,))))
        return sum(jnp.sum(leaf) for leaf in leaves) * model.block.weight

    (draw,) = draws_of(port_of(loss))
    assert (draw.kind, draw.shape) == ("normal", (3,))
    assert draw.refused.startswith("it is drawn inside of a jit, scan, vmap or remat")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: jax.random.gumbel(KEY, (3,)), "gumbel"),
        (lambda: jax.random.categorical(KEY, jnp.zeros((3, 2))), "categorical"),
        (lambda: jax.random.randint(KEY, (3,), 0, 5), "randint"),
        (lambda: jax.random.permutation(KEY, 3), "permutation"),
        (lambda: jax.random.normal(KEY, (3,), jnp.complex64).real, "complex normal"),
    ],
)
def test_other_numbers_are_refused(function: Callable[[], Any], kind: str) -> None:
    (draw,) = noted(function)
    assert (draw.kind, draw.shape) == (kind, (3,))
    assert draw.refused.startswith("only normal, uniform, bernoulli")


HELD = [held_normal]  # not a module's global, so nothing replaces it


def test_a_draw_by_a_function_that_cannot_be_replaced_is_refused() -> None:
    (draw,) = noted(lambda: HELD[0](KEY, (3,)))
    assert draw.refused == "call jax.random.normal, uniform or bernoulli by their names"


def frozen() -> nnx.Module:
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    layer.eval()
    return layer


@pytest.mark.parametrize(
    "drop", [lambda: nnx.Dropout(0.0, rngs=nnx.Rngs(0)), lambda: Dropout(0.0, rngs=nnx.Rngs(0)), frozen]
)
def test_dropout_of_rate_zero_or_in_evaluation_draws_nothing(drop: Callable[[], nnx.Module]) -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return model(batch["x"]).mean() + jax.random.bernoulli(KEY, 1.0, (2,)).sum()

    assert draws_of(port_of(loss, lambda: nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), drop()))) == ()


def test_keys_alone_are_no_draws() -> None:
    assert noted(lambda: jax.random.key_data(jax.random.fold_in(jax.random.split(KEY)[0], 3))) == ()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_loss_under_grad_has_the_numbers_of_its_batch(dtype: str, tmp_path: Path) -> None:
    port = port_of(lambda model, batch: (model.block.weight * batch["x"] * model.block.rngs.normal((4, 3))).mean())
    draws = draws_of(port)
    drawn = serving(DrawnPort(**vars(port), draws=tuple(Pair(draw, draw) for draw in draws), seed=3))
    (batch,) = drawn.micro_batches(0, 0, "jax")
    with jax.enable_x64(dtype == "float64"):
        gradient = jax.grad(lambda weight: _loss(drawn, weight, batch, dtype))(jnp.ones((), dtype))
    assert gradient.dtype == dtype
    assert gradient == pytest.approx(batch[f"{ENTRY}0"].mean(), rel=1e-6)


def _loss(port: Port, weight: jax.Array, batch: Any, dtype: str) -> jax.Array:
    model = Net()
    model.block.weight[...] = weight
    return port.jax_loss(model, {name: jnp.asarray(x, dtype) for name, x in batch.items()})


def test_a_port_that_draws_nothing_takes_the_path_without_numbers(tmp_path: Path) -> None:
    source = PortFile(str(write(tmp_path)))
    case = PortCase(source, world_size=2, steps=1)
    assert draws_of(case.port) == ()
    assert type(case.port) is Port
    batch = next(case.batches())
    assert batch.last.keys() == examples_of(batch.last).keys() == {"x", "y"}
