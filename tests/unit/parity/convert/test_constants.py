"""Constants that one of the two models holds as a buffer: declared by `no_twin`, they are in no table of names."""

from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from jax import numpy as jnp

from jaxddp.errors import InputError
from jaxddp.parity.convert import Converter
from jaxddp.parity.convert.weight_files import ModelPair
from jaxddp.parity.port import Port


class TorchScaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))


class FlaxShifted(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.shift = nnx.Variable(jnp.array([5.0]))


def port(**options: Any) -> Port:
    def never(*arguments: Any) -> Any:
        raise AssertionError("not needed")

    losses = {"torch_loss": never, "jax_loss": never, "batch": never}
    return Port(torch_model=TorchScaled, jax_model=FlaxShifted, optimizer="sgd", **losses, **options)


def test_constants_keep_their_values_when_weights_are_converted() -> None:
    twins = ModelPair.of_port(port(no_twin=["scale", "shift"]))
    assert {piece.jax for piece in twins.converter.pieces} == {"fc.kernel", "fc.bias"}
    of_torch = {name: x.numpy() for name, x in TorchScaled().state_dict().items()}
    flax = twins.translated(of_torch, "jax")
    assert flax["shift"].tolist() == [5.0]
    back = twins.translated(flax, "torch")
    assert back.keys() == of_torch.keys() and back["scale"].tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(back["fc.weight"], of_torch["fc.weight"])


def test_converted_weights_do_not_change_with_the_model_that_they_came_from() -> None:
    of_torch = {name: x.numpy() for name, x in TorchScaled().state_dict().items()}
    flax = ModelPair.of_port(port(no_twin=["scale", "shift"])).translated(of_torch, "jax")
    assert not any(np.shares_memory(x, theirs) for x in flax.values() for theirs in of_torch.values())


def test_constants_that_are_not_declared_have_no_twin() -> None:
    with pytest.raises(InputError, match=r"jax's shift \(1,\) has no twin in torch.*torch's scale \(2,\) has no twin"):
        ModelPair.of_port(port())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc.weight", "no_twin: torch's fc.weight is a parameter; must be a constant"),
        ("scales", "no_twin: scales is in neither model"),
    ],
)
def test_only_constants_that_are_there_may_lack_a_twin(name: str, message: str) -> None:
    shapes = {"fc.kernel": (3, 2), "fc.bias": (2,)}
    with pytest.raises(InputError, match=message):
        Converter(TorchScaled(), shapes, no_twin=["scale", name])


def test_weights_of_a_plain_tree_are_converted_without_its_counters_and_constants() -> None:
    """As of Haiku: a parameter and a constant in one tree, a running mean and its counter in the state."""

    def jax_model() -> Any:
        params = {"net/~/fc": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2), "shift": jnp.ones(1)}}
        return params, {"net/~/fc": {"scale": jnp.ones(2), "counter": jnp.int32(7)}}

    def jax_loss(params: Any, state: Any, batch: Any) -> Any:
        raise AssertionError("not needed")

    def never(*arguments: Any) -> Any:
        raise AssertionError("not needed")

    losses = {"torch_loss": never, "jax_loss": jax_loss, "batch": never}
    names = {"net.fc": "fc", "net.fc.scale": "scale"}
    twins = ModelPair.of_port(
        Port(
            torch_model=TorchScaled,
            jax_model=jax_model,
            optimizer="sgd",
            names=names,
            no_twin=["net.fc.shift"],
            **losses,
        )
    )
    tensors = {name: tensor.numpy() for name, tensor in TorchScaled().state_dict().items()}
    arrays = twins.translated(tensors, "jax")
    assert arrays.keys() == {"net.fc.w", "net.fc.b", "net.fc.scale"}
    np.testing.assert_array_equal(arrays["net.fc.w"], tensors["fc.weight"].T)
    back = twins.translated(arrays, "torch")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
