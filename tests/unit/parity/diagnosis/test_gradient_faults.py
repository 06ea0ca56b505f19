"""Faults of gradients are found where two programs compute the same loss."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forced.gradients import gradient_faults
from jaxddp.parity.diagnosis.forced.labels import Edits
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.jax_side.value_graph import TracedLoss
from jaxddp.parity.report.sentences import line, sentence

WIDTH = 4
Pieces = dict[str, Callable[[jax.Array], jax.Array]]


class Twins(nn.Module):
    """An encoder, a target that is a constant, and a gate that is a constant, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def torch_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x = batch["x"]
    hidden = torch.tanh(model.encoder(x))
    target = torch.sin(model.target(x)).detach()
    with torch.no_grad():
        gates = torch.zeros_like(hidden)
        for k in range(len(x)):
            gates[k] = torch.sigmoid(hidden[k]) + 0.5
        scale = gates / gates.mean()
    return {"loss": ((scale * hidden - target) ** 2).mean() + 0.1 * model.target.weight.pow(2).sum()}


def jax_loss(pieces: Pieces) -> Callable[..., jax.Array]:
    def piece(name: str, default: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return pieces.get(name, default)

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        def linear(name: str) -> jax.Array:
            return batch["x"] @ params[f"{name}.weight"].T + params[f"{name}.bias"][None]

        hidden = piece("hidden", lambda x: x)(jnp.tanh(linear("encoder")))
        target = piece("target", jax.lax.stop_gradient)(jnp.sin(linear("target")))
        gates = jax.nn.sigmoid(hidden) + 0.5
        scale = piece("scale", jax.lax.stop_gradient)(gates / gates.mean())
        penalty = 0.1 * jnp.sum(piece("penalty", lambda x: x)(params["target.weight"]) ** 2)
        return jnp.mean((scale * hidden - target) ** 2) + penalty

    return loss


@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (-cotangent,))


@jax.custom_vjp
def signed_gradient(x: jax.Array) -> jax.Array:
    return x


signed_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.sign(cotangent),))


def faults_between(pieces: Pieces) -> list[Any]:
    torch.manual_seed(0)
    model, x = Twins().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    loss = TorchGraph(model, torch_loss, {"x": x})
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    arguments = params, {"x": jnp.asarray(x.numpy())}
    graph = TracedLoss(jax_loss(pieces), arguments).graph(arguments, backward=True)
    assert np.isclose(graph[graph.end].array, loss.graph[loss.graph.end].array, rtol=1e-13)
    names = {id(value): name for name, value in model.named_parameters()}
    return gradient_faults(loss, graph, Edits(loss, names, {id(x): "x"}))


CASES: dict[str, tuple[Pieces, str]] = {
    "no detach": ({"target": lambda x: x}, "the gradient is not stopped at the result of sin"),
    "no_grad": ({"scale": lambda x: x}, "the gradient is not stopped at scale, though torch has no_grad"),
    "stopped": ({"penalty": jax.lax.stop_gradient}, "no gradient reaches target.weight in pow"),
    "reversed": ({"hidden": reversed_gradient}, "the gradient of hidden in mul, times -1"),
    "in another way": ({"hidden": signed_gradient}, "another gradient of hidden, from mul"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_a_gradient_is_named(name: str) -> None:
    pieces, says = CASES[name]
    with jax.enable_x64(True):
        (fault,) = faults_between(pieces)
    assert (line(fault.names[0]) if fault.names else fault.what and sentence(fault.what)) == says
    assert fault.text.lines.torch is not None


def test_two_faults_of_gradients_are_both_named() -> None:
    with jax.enable_x64(True):
        faults = faults_between({"target": lambda x: x, "penalty": jax.lax.stop_gradient})
    assert {fault.names[0].change.fault for fault in faults} == {"gradient_not_stopped", "gradient_stopped"}


def test_equal_gradients_have_no_fault() -> None:
    with jax.enable_x64(True):
        assert faults_between({}) == []
