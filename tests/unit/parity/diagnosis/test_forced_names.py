"""Faults that were located have names that are true on other inputs; others are said as code, in the user's names."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.report.sentences import line
from tests.support.read_programs import Params, evidence_between, linear

BLOCKS, EXAMPLES, WIDTH = 3, 5, 6


class Gated(nn.Module):
    """Blocks of a gated branch, a scaled sum, and a temperature's logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        for gate, up in zip(self.gates, self.ups, strict=True):
            branch = F.silu(gate(x)) * up(x)
            x = x + self.scale * branch
        weighted = x * valid
        return weighted.sum(0) / valid.sum() * self.log_scale.exp()


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": F.huber_loss(model(batch["x"], batch["valid"]), batch["y"]), "count": torch.tensor(1.0)}


def gated(p: Params, k: int, x: jax.Array) -> jax.Array:
    return jax.nn.silu(linear(p, f"gates.{k}", x)) * linear(p, f"ups.{k}", x)


def sum_of(p: Params, k: int, x: jax.Array) -> jax.Array:
    return x + p["scale"][None] * gated(p, k, x)


def mean_of(x: jax.Array, valid: jax.Array) -> jax.Array:
    return (x * valid).sum(0) / valid.sum()


def jax_loss(pieces: Mapping[str, Any]) -> Any:
    """Return the loss with some of its pieces replaced."""
    block, mean, temperature, times = (
        pieces.get(name, piece)
        for name, piece in (("block", sum_of), ("mean", mean_of), ("temperature", jnp.exp), ("times", 1.0))
    )

    def loss(p: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for k in range(BLOCKS):
            x = block(p, k, x)
        size = jnp.abs(mean(x, batch["valid"]) * temperature(p["log_scale"]) * times - batch["y"])
        return jnp.where(size < 1, size**2 / 2, size - 0.5).mean()

    return loss


def ruling_on(**pieces: Any) -> Ruling:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(EXAMPLES, WIDTH)) for name in ("x",)}
    batch |= {"y": rng.normal(size=WIDTH), "valid": (np.arange(EXAMPLES) < EXAMPLES - 1)[:, None].astype(float)}
    return search_model(evidence_between(Gated().double(), torch_loss, jax_loss(pieces), [batch]))[0]


def test_a_name_is_true_on_other_inputs() -> None:
    """In the run the logarithm is positive, so that the port's abs does nothing, as if the exp were left out."""
    ruling = ruling_on(temperature=jnp.abs)
    assert [line(named) for named in ruling.named] == ["abs instead of exp"] and ruling.segments


# Pieces -> what is said, and in how many places the segment is.
CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "exp left out": ({"temperature": lambda x: x}, "exp left out", 1),
    "moved in every block": (
        {"block": lambda p, k, x: p["scale"][None] * (x + gated(p, k, x))},
        "scale * (x + branch) instead of x + (scale * branch), in linear of gates.1",
        BLOCKS,
    ),
    "operands swapped in every block": (
        {
            "block": lambda p, k, x: (
                x + p["scale"][None] * (linear(p, f"gates.{k}", x) * jax.nn.silu(linear(p, f"ups.{k}", x)))
            )
        },
        "gates.0(...) * (ups.0(...) * sigmoid(ups.0(...))) instead of silu(gates.0(...)) * ups.0(...), in mul",
        BLOCKS,
    ),
    "no mask": (
        {"mean": lambda x, valid: x.mean(0)},
        "the mean of the result of add over axis 0, all elements (5 in number), in place of the result of div",
        1,
    ),
    "a number before a value": (
        {"temperature": lambda x: 1 - x},
        "1 - log_scale instead of exp(log_scale), in mul",
        1,
    ),
    "a factor": ({"times": 0.25}, "the result of mul in huber_loss times 0.25", 1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_in_all_of_its_places(name: str) -> None:
    pieces, says, places = CASES[name]
    ruling = ruling_on(**pieces)
    assert [line(one) for one in ruling.named] == [says]
    assert [segment.places for segment in ruling.segments] == [places]


class Column(nn.Linear):
    """A layer with one output, whose axis the loss drops."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)


@pytest.mark.parametrize("drop", [lambda x: x.squeeze(-1), lambda x: x.reshape(-1)], ids=["squeeze", "reshape"])
def test_an_axis_that_the_port_keeps_is_named_with_both_shapes(drop: Any, request: pytest.FixtureRequest) -> None:
    """(5, 1) minus (5,) is (5, 5)."""

    def column_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(drop(model(batch["x"])), batch["y"]), "count": torch.tensor(1.0)}

    def loss(p: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.square((batch["x"] @ p["weight"].T + p["bias"][None]) - batch["y"][None]).mean()

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(EXAMPLES, WIDTH)), "y": rng.normal(size=EXAMPLES)}
    ruling = search_model(evidence_between(Column().double(), column_loss, loss, [batch]))[0]
    call = request.node.callspec.id
    assert [line(one) for one in ruling.named] == [f"{call} left out: shape (5, 1) instead of (5,)"]
