"""Trees of arrays, as Haiku and Equinox have them: their names, their pure losses, and what optimizers see."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.nn.model_tree import seeing
from jaxddp.nn.plain import PlainFunctional


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A layer as Equinox writes it: arrays, a function and a number are leaves, the width is no leaf."""

    weight: jax.Array
    act: Callable[[jax.Array], jax.Array]
    rate: float
    width: int = field(metadata={"static": True})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.weight @ x) * self.rate


@jax.tree_util.register_dataclass
@dataclass
class Net:
    layers: list[Layer]
    steps: jax.Array
    table: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x + self.table * self.steps


def net() -> Net:
    layers = [Layer(jnp.full((2, 2), value), jnp.tanh, 2.0, 2) for value in (0.1, 0.2)]
    return Net(layers, jnp.int32(3), np.ones(2))


def loss_of(model: Net, batch: Any) -> jax.Array:
    return jax.vmap(model)(batch["x"])[:, 0]


BATCH = {"x": jnp.array([[1.0, 2.0], [3.0, 5.0]])}


def test_the_arrays_of_a_module_like_equinoxs_are_parameters_and_its_other_leaves_stay() -> None:
    functional = PlainFunctional(net(), loss_of)
    assert functional.params.keys() == {"layers.0.weight", "layers.1.weight", "table"} and not functional.buffers
    sums, _ = functional.local_loss(loss_of)(functional.params, {}, BATCH)
    np.testing.assert_allclose(sums["loss"], loss_of(net(), BATCH).sum(), rtol=1e-6)
    (model,) = functional.arguments(functional.params, {})
    assert isinstance(model, Net) and model.layers[1].act is jnp.tanh and model.layers[0].width == 2
    assert model.steps == 3


def test_a_constant_of_a_tree_is_no_parameter() -> None:
    functional = PlainFunctional(net(), loss_of, ["table"])
    assert functional.params.keys() == {"layers.0.weight", "layers.1.weight"}
    assert functional.shapes.keys() == {"layers.0.weight", "layers.1.weight", "table"}
    sums, _ = functional.local_loss(loss_of)(functional.params, {}, BATCH)
    np.testing.assert_allclose(sums["loss"], loss_of(net(), BATCH).sum(), rtol=1e-6)


def test_gradients_of_a_tree_are_those_of_jax() -> None:
    functional = PlainFunctional(net(), loss_of, ["table"])
    local_loss = functional.local_loss(loss_of)
    gradients = jax.grad(lambda params: local_loss(params, {}, BATCH)[0]["loss"])(functional.params)

    def by_hand(weight: jax.Array) -> jax.Array:
        model = net()
        model.layers[1].weight = weight
        return loss_of(model, BATCH).sum()

    np.testing.assert_allclose(gradients["layers.1.weight"], jax.grad(by_hand)(net().layers[1].weight), rtol=1e-6)


def haiku() -> Any:
    params = {"net/~/fc": {"w": jnp.ones((2, 1)), "b": jnp.zeros(1)}}
    state = {"net/~/mean": {"average": jnp.zeros(1), "counter": jnp.int32(0)}}
    return params, state


def haiku_loss(params: Any, state: Any, batch: Any) -> Any:
    x = (batch["x"] @ params["net/~/fc"]["w"])[:, 0] + params["net/~/fc"]["b"]
    old = state["net/~/mean"]
    mean = {"average": 0.5 * old["average"] + x.mean(), "counter": old["counter"] + 1}
    return x, {"net/~/mean": mean}


def test_a_state_like_haikus_is_carried_in_the_buffers() -> None:
    functional = PlainFunctional(haiku(), haiku_loss)
    assert functional.params.keys() == {"net.fc.w", "net.fc.b"}
    assert functional.buffers.keys() == {"net.mean.average", "net.mean.counter"}
    assert functional.shapes.keys() == {"net.fc.w", "net.fc.b", "net.mean.average"}  # a counter has no twin
    local_loss = functional.local_loss(haiku_loss)
    buffers = functional.buffers
    for _ in range(2):
        sums, buffers = local_loss(functional.params, buffers, BATCH)
    assert float(sums["loss"]) == 11.0
    sizes = {name: float(value.sum()) for name, value in buffers.items()}
    assert sizes == {"net.mean.average": 0.5 * 5.5 + 5.5, "net.mean.counter": 2}


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (lambda x: x, loss_of, "jax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        (Net, loss_of, "jax_model: must return .*, not the class Net itself$"),
        (optax.sgd(1.0), loss_of, "jax_model: must return .*, not optax.*; return what its init returns$"),
        ({"n": jnp.arange(3)}, loss_of, "jax_model: must return a flax.nnx or flax.linen module, or a tree of arrays"),
        ({"w": jnp.ones(2, complex)}, loss_of, "jax_model: w is complex64; must be two real arrays"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, loss_of, "jax_model: both .* would be called a.b; rename one"),
        (
            {"w": jnp.ones(2)},
            haiku_loss,
            r"jax_model: must return \(params, state\), as jax_loss takes a state, .* dict",
        ),
        (({"w": jnp.ones(2)}, {"w": jnp.ones(2)}), haiku_loss, "jax_model: both a parameter and the state have .* w;"),
    ],
)
def test_a_tree_that_cannot_be_a_model_is_refused(model: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        PlainFunctional(model, loss_fn)


@pytest.mark.parametrize(
    ("returned", "message"),
    [(jnp.ones(2), r"must return \(loss, state\), and returns"), ((jnp.ones(2), {}), "all of the state; lacks n")],
)
def test_a_loss_that_loses_its_state_is_refused(returned: Any, message: str) -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        return returned

    functional = PlainFunctional(({"w": jnp.ones(2)}, {"n": jnp.ones(2)}), loss)
    with pytest.raises(InputError, match=message):
        functional.local_loss(loss)(functional.params, functional.buffers, BATCH)


def test_an_optimizer_sees_the_tree_without_its_other_leaves() -> None:
    seen: list[Any] = []

    def first_layer(params: Any) -> Any:
        seen.append(params)
        first, second = (jax.tree.map(lambda _, is_first=n == 0: is_first, params.layers[n]) for n in (0, 1))
        return Net([first, second], None, False)

    functional = PlainFunctional(net(), loss_of)
    optimizer = seeing(functional.param_tree, optax.chain(optax.masked(optax.trace(0.5), first_layer), optax.scale(2)))
    state = optimizer.init(functional.params)
    gradients = jax.tree.map(jnp.ones_like, functional.params)
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, functional.params)
    assert isinstance(seen[0], Net) and seen[0].steps is None and seen[0].layers[0].act is None
    sizes = {name: float(x.ravel()[0]) for name, x in updates.items()}
    assert sizes == {"layers.0.weight": 3.0, "layers.1.weight": 2.0, "table": 2.0}
    trace = state[0].inner_state.trace
    assert trace.keys() == functional.params.keys() and trace["layers.0.weight"].shape == (2, 2)


def test_a_tuple_of_arrays_is_not_taken_for_the_optimizers_own_tuples() -> None:
    functional = PlainFunctional(((jnp.ones((2, 1)), jnp.ones(1)), (jnp.ones((1, 1)), jnp.ones(1))), lambda m, b: m)
    assert list(functional.params) == ["0.0", "0.1", "1.0", "1.1"]
    optimizer = seeing(functional.param_tree, optax.chain(optax.trace(0.5), optax.scale(1)))
    state = optimizer.init(functional.params)
    updates, state = optimizer.update(functional.params, state, functional.params)
    assert state[0].trace.keys() == updates.keys() == functional.params.keys()
