"""Edits that a single call does not have, or that the port's numbers and lines suggest: one planted twin of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import lax
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.calls import Call
from jaxddp.parity.diagnosis.forward.index_edits import shifts
from jaxddp.parity.diagnosis.forward.loss_causes import ModelEvidence, search_model
from jaxddp.parity.report.sentences import line
from tests.support.read_programs import evidence_between

ROWS, COLUMNS, STEPS = 4, 5, 2
CLEAN = 1e-14  # measured: up to 1e-15


class Vector(nn.Module):
    """A model that is one vector; the losses do the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, COLUMNS, dtype=torch.float64)[None])


@dataclass(frozen=True)
class Twins:
    """The mean of a value in torch, and in jax with a fault: (w, batch) -> value.

    Attributes:
        torch, jax: the two; the batch has x and y, (ROWS, COLUMNS), and indices t, (ROWS,).
        faults: names of the fault; (): the two are equal.
        says: words of the cause.
    """

    torch: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    jax: Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
    faults: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


def standardised(z: Any) -> Any:
    return (z - z.mean()) / 1.7


def ends(z: Any, cos: Callable[[Any], Any]) -> Any:
    return z[:, 0] * cos(1.0 + z[:, -1])


def normalised(z: Tensor) -> Tensor:
    return F.normalize(z, dim=-1)


def two_terms(z: Tensor, y: Tensor) -> Tensor:
    return F.relu((z * y).sum(-1) + 1.0).mean() + 1e-3 * z.square().sum(-1).mean()


def returns(w: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    values = batch["x"] * w
    with torch.no_grad():
        target = batch["y"] + values[:, :1]
        scaled = (target - values) * 3.0
    return (values - target).square() + torch.tanh(values) * scaled


def returns_in_jax(w: jax.Array, batch: Mapping[str, jax.Array], stop: Callable[[jax.Array], jax.Array]) -> jax.Array:
    values = batch["x"] * w
    target = batch["y"] + values[:, :1]
    scaled = lax.stop_gradient((target - values) * 3.0)
    return jnp.square(values - stop(target)) + jnp.tanh(values) * scaled


CASES = {
    "a chain left out": Twins(
        lambda w, batch: torch.tanh(standardised(batch["x"] * w)),
        lambda w, batch: jnp.tanh(batch["x"] * w),
        ("calls_left_out",),
        ("sub by the result of mean and div by 1.7 left out",),
    ),
    "a mean for a sum": Twins(
        lambda w, batch: torch.tanh((batch["x"] * w).sum(dim=-1)),
        lambda w, batch: jnp.tanh((batch["x"] * w).mean(axis=-1)),
        ("other_function",),
        ("mean instead of sum of the result of mul",),
    ),
    "a norm for a sum": Twins(
        lambda w, batch: torch.tanh(0.2 * (batch["x"] * w).sum(-1)),
        lambda w, batch: jnp.tanh(0.2 * jnp.linalg.norm(batch["x"] * w, axis=-1)),  # not where tanh is flat
        ("other_function",),
        ("norm instead of sum of the result of mul",),
    ),
    "a mean for one of two sums, the other of a single number": Twins(
        lambda w, batch: torch.tanh((batch["x"] * w).sum(dim=-1)) * torch.ones((), dtype=w.dtype).sum(),
        lambda w, batch: jnp.tanh((batch["x"] * w).mean(axis=-1)),
        ("other_function",),
        ("mean instead of sum of the result of mul in the loss (call 1)",),
    ),
    "a factor for a divisor": Twins(
        lambda w, batch: torch.tanh(batch["x"] * w / 0.2),
        lambda w, batch: jnp.tanh(batch["x"] * w * 0.2),
        ("other_function",),
        ("mul by 0.2 instead of div",),
    ),
    "both numbers of a call": Twins(
        lambda w, batch: torch.clamp(batch["x"] * w, 0.2, 1.2),
        lambda w, batch: jnp.clip(batch["x"] * w, 0.1, 0.9),
        ("number",),
        ("clamp's min and max 0.1 and 0.9 instead of 0.2 and 1.2",),
    ),
    "one constant in two places": Twins(
        lambda w, batch: torch.tanh(0.9 * batch["x"] * w + 0.1 * w),
        lambda w, batch: jnp.tanh(0.7 * batch["x"] * w + 0.3 * w),
        ("number", "number"),
        ("before mul, x times 0.7, the reference has 0.9; w times 0.3, the reference has 0.1",),
    ),
    "one constant twice": Twins(
        lambda w, batch: 5.0 * torch.tanh(batch["x"] * w / 5.0),
        lambda w, batch: 2.5 * jnp.tanh(batch["x"] * w / 2.5),
        ("number", "number"),
        (
            "before tanh, the result of mul divided by 2.5, the reference has 5; before mean, the result of tanh times "
            "2.5, the reference has 5",
        ),
    ),
    "an input a step early": Twins(
        lambda w, batch: torch.tanh(batch["x"] * w) * batch["y"],
        lambda w, batch: jnp.tanh(batch["x"] * w) * jnp.roll(batch["y"], -1, 1).at[:, -1].set(0),
        ("other_index",),
        ("y moved by one along axis 1, one too early, with a 0 at its end",),
    ),
    "the index before": Twins(
        lambda w, batch: torch.cumsum(w[0], 0)[batch["t"]],
        lambda w, batch: jnp.cumsum(w[0])[jnp.maximum(batch["t"] - 1, 0)],
        ("other_index",),
        ("the index before, at the ends the end itself, instead of the index",),
    ),
    "the last left out": Twins(
        lambda w, batch: ends(torch.tanh(batch["x"] * w), torch.cos),
        lambda w, batch: ends(jnp.tanh(batch["x"] * w).at[:, -1].set(0), jnp.cos),
        ("other_index",),
        ("values at index -1, the last, of axis 1 count as 0: they are left out",),
    ),
    "another spacing": Twins(
        lambda w, batch: torch.cumprod(1 - torch.linspace(0.01, 0.25, COLUMNS, dtype=w.dtype), dim=0) * w[0],
        lambda w, batch: jnp.cumprod(1 - jnp.linspace(0.1, 0.5, COLUMNS) ** 2) * w[0],
        ("other_function",),
        ("squares of equally spaced roots instead of linspace",),
    ),
    "another norm": Twins(
        lambda w, batch: torch.tanh(normalised(batch["x"] * w)),
        lambda w, batch: jnp.tanh(batch["x"] * w / jnp.abs(batch["x"] * w).sum(-1, keepdims=True)),
        ("number",),
        ("normalize's p 1 instead of 2",),
    ),
    "a constant made of numbers": Twins(
        lambda w, batch: torch.square(batch["x"] * w + (0.5 * np.log(2 * np.pi) + 0.5)),
        lambda w, batch: jnp.square(batch["x"] * w + 0.5 * jnp.log(2 * jnp.pi)),
        ("number",),
        ("before square, the result of mul plus 0.9189385332, the reference has 1.418938533",),
    ),
    "two faults": Twins(
        lambda w, batch: two_terms(batch["x"] * w, batch["y"]),
        lambda w, batch: (
            jax.nn.relu((batch["x"] * w * batch["y"]).sum(-1) + 0.5).mean() + 1e-3 * jnp.square(batch["x"] * w).mean()
        ),
        ("number", "other_function"),
        (
            "before relu, the result of sum plus 0.5, the reference has 1; mean instead of sum of the result of square "
            "in the loss (call 2)",
        ),
    ),
    "a line of a no_grad block": Twins(
        returns,
        lambda w, batch: returns_in_jax(w, batch, lambda x: x),
        ("gradient_not_stopped",),
        ("the gradient is not stopped at target, though torch has no_grad",),
    ),
    "none": Twins(returns, lambda w, batch: returns_in_jax(w, batch, lax.stop_gradient)),
}


def evidence_of(twins: Twins) -> ModelEvidence:
    """Return two steps of the loss in jax, with the program that was read from it."""
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(ROWS, COLUMNS)), "y": rng.normal(size=(ROWS, COLUMNS)), "t": np.array([0, 2, 4, step])}
        for step in range(STEPS)
    ]

    def torch_loss(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": twins.torch(model.w, batch).mean(), "count": torch.tensor(1.0)}

    def jax_loss(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
        return twins.jax(params["w"], batch).mean()

    return evidence_between(Vector(), torch_loss, jax_loss, batches)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # a deviation of a single number
def test_a_planted_twin_is_named(case: str) -> None:
    twins = CASES[case]
    ruling, _ = search_model(evidence_of(twins))
    assert tuple(line(one) for one in ruling.named) == twins.says
    assert all(one.faults == twins.faults and one.residual <= CLEAN for one in ruling.named)


def test_tensors_of_indices_are_no_slices_that_may_be_shifted() -> None:
    x = torch.ones(4, 3)

    def shifted(*indices: Any) -> list[Any]:
        calls = [Call(("__getitem__", k), Tensor.__getitem__, (x, index), {}) for k, index in enumerate(indices)]
        return [*shifts(calls, range(len(calls)), {})]

    assert shifted(slice(None, -1), slice(1, None))
    assert not shifted(torch.tensor([0, 1]), torch.tensor([2, 3]))
