"""Faults that no single call shows: exchanged arguments of a function, what torch makes left out, values of padding."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from jaxddp.parity.diagnosis.forced.causes import LocatedFault
from jaxddp.parity.diagnosis.forced.hits import key_of
from jaxddp.parity.report.sentences import line, sentence
from tests.support.forced_programs import Arrays, faults_of

BATCH, TIME, WIDTH = 4, 5, 3
LENGTHS = np.array([3, 5, 2, 4])


class Policy(nn.Module):
    """A normal density of actions, and the mean of masked states."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(-0.5, 0.4, WIDTH))


def log_density(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    return -(((action - mean) / log_std.exp()) ** 2) / 2 - log_std


def torch_loss(model: Policy, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    density = log_density(model.mean(batch["x"]), model.log_std, batch["action"])
    is_word = (torch.arange(TIME) < torch.from_numpy(LENGTHS)[:, None]).unsqueeze(-1)
    states = torch.tanh(density * is_word)
    return {"loss": ((states * is_word).sum(1) / is_word.sum(1)).square().mean()}


def jax_density(mean: jax.Array, log_std: jax.Array, action: jax.Array) -> jax.Array:
    return -0.5 * jnp.square((action - mean) * jnp.exp(-log_std)) - log_std


def jax_loss(
    p: Arrays,
    batch: Arrays,
    density: Callable[..., jax.Array] = jax_density,
    pooled: Callable[[jax.Array, jax.Array], jax.Array] = lambda total, count: total / count,
) -> jax.Array:
    """Return the loss; padding has other values than in torch, and they are left out later."""
    mean = batch["x"] @ p["mean.weight"].T + p["mean.bias"][None, None]
    states = jnp.tanh(density(mean, p["log_std"][None, None], batch["action"]))
    is_word = (jnp.arange(TIME)[None] < LENGTHS[:, None])[..., None]
    total = jnp.where(is_word, states, 0).sum(1)
    return jnp.square(pooled(total, is_word.sum(1))).mean()


def faults(**pieces: Callable[..., jax.Array]) -> list[LocatedFault]:
    torch.manual_seed(0)
    model, rng = Policy().double(), np.random.default_rng(0)
    batch = {name: rng.normal(size=(BATCH, TIME, WIDTH)) for name in ("x", "action")}
    return faults_of(model, torch_loss, lambda p, b: jax_loss(p, b, **pieces), batch)


def said(fault: LocatedFault) -> str:
    return line(fault.names[0]) if fault.names else sentence(fault.what) if fault.what else ""


def lines_of(fault: LocatedFault) -> list[str]:
    return [one.text for one in fault.text.lines if one is not None]


def test_padding_that_is_computed_otherwise_is_no_fault() -> None:
    assert faults() == []


def test_arguments_that_are_exchanged_are_quoted_where_they_are_given() -> None:
    [fault] = faults(density=lambda mean, log_std, action: jax_density(log_std, mean, action))
    assert said(fault) == "the arguments mean and log_std of log_density exchanged"
    jax_line, torch_line = lines_of(fault)
    assert "jax_density(log_std, mean, action)" in jax_line and torch_line.startswith("density = log_density(")


def test_an_argument_that_is_given_twice_is_named() -> None:
    [fault] = faults(density=lambda mean, log_std, action: jax_density(mean, mean, action))
    assert said(fault) == "mean in place of log_std as an argument of log_density"


@pytest.mark.parametrize(
    ("pooled", "says"),
    [
        (lambda total, count: total, "div left out in the loss (call 2)"),
        (lambda total, count: total / (count - 1), "sub(...) in place of sum(...) in div"),
        (lambda total, count: total - count, "sub instead of div in the loss (call 2)"),
    ],
)
def test_a_fault_beside_such_padding_is_the_only_one(pooled: Callable[..., jax.Array], says: str) -> None:
    [fault] = faults(pooled=pooled)
    assert said(fault) == says
    assert lines_of(fault)[1].startswith('return {"loss"')


def test_an_input_in_place_of_all_that_torch_makes_is_named() -> None:
    [fault] = faults(density=lambda mean, log_std, action: action)
    assert said(fault) == "action in place of mul(...) in tanh"


def test_an_order_is_known_by_all_of_its_places() -> None:
    places = np.arange(64 * 64)
    assert key_of(places) == key_of(places.copy()) != key_of(places.reshape(64, 64).T.ravel())
    assert key_of(None) is None
