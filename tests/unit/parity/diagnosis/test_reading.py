"""Faults outside of the catalogue are found from where the two programs part, with their lines on both sides."""

from collections.abc import Mapping

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from jaxddp.parity.report.sentences import line
from tests.support.read_programs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    Params,
    Pieces,
    evidence_between,
    evidence_of,
    linear,
    stop,
)

CLEAN = 1e-14  # measured: up to 5e-16

# Pieces of the port, names of the faults, what is said, a part of the line in torch and in jax.
CASES = {
    "slope": (
        Pieces(slope=0.2),
        ("number",),
        "leaky_relu's negative_slope 0.2, the reference has 0.01",
        ("F.leaky_relu(", "jax.nn.leaky_relu("),
    ),
    "temperature": (
        Pieces(temperature=0.1),
        ("number",),
        "before cross_entropy, the result of linear divided by 0.1, the reference has 0.07",
        ("/ 0.07", "/ self.temperature"),
    ),
    "residual left out": (
        Pieces(joined=lambda x, y: y),
        ("operand_left_out",),
        "the result of leaky_relu left out of add",
        ("F.gelu(", "jax.nn.gelu("),
    ),
    "half a residual": (
        Pieces(joined=lambda x, y: 0.5 * x + y),
        ("factor",),
        "the result of leaky_relu in add times 0.5",
        ("F.gelu(", "joined=lambda x, y: 0.5 * x + y"),
    ),
    "activation": (
        Pieces(activation=jax.nn.silu),
        ("other_function",),
        "silu instead of gelu",
        ("F.gelu(", "self.activation("),
    ),
    "norm after": (
        Pieces(normalised_after=True),
        ("call_moved",),
        "layer_norm after add instead of before in norm",
        ("self.norm(", "/ jnp.sqrt(variance + eps)"),
    ),
    "stopped": (
        Pieces(inner=stop),
        ("gradient_stopped",),
        "no gradient reaches the result of layer_norm in linear in fc2",
        ("self.fc2(", "self.inner(norm("),
    ),
    "probabilities": (
        Pieces(logits=jax.nn.softmax),
        ("call_added",),
        "softmax of the result of div before cross_entropy",
        ("F.cross_entropy(", "self.logits("),
    ),
    "slope and temperature": (
        Pieces(slope=0.2, temperature=0.1),
        ("number", "number"),
        "leaky_relu's negative_slope 0.2, the reference has 0.01; before cross_entropy, the result of "
        "linear divided by 0.1, the reference has 0.07",
        ("F.leaky_relu(", "jax.nn.leaky_relu("),
    ),
    "a fault of the catalogue and another": (
        Pieces(eps=1e-6, activation=jnp.tanh),
        ("norm_epsilon", "other_function"),
        "LayerNorm eps 1e-06 in norm, the reference has 1e-05; tanh instead of gelu",
        ("self.norm(", "jnp.sqrt("),
    ),
    "three": (
        Pieces(slope=0.2, eps=1e-6, temperature=0.1),
        ("number", "norm_epsilon", "number"),
        "leaky_relu's negative_slope 0.2, the reference has 0.01; LayerNorm eps 1e-06 in norm, the reference has "
        "1e-05; before cross_entropy, the result of linear divided by 0.1, the reference has 0.07",
        ("F.leaky_relu(", "jax.nn.leaky_relu("),
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_lines(case: str) -> None:
    pieces, faults, says, (in_torch, in_jax) = CASES[case]
    ruling, _ = search_model(evidence_of(pieces))
    [named] = ruling.named
    assert (named.faults, line(named)) == (faults, says)
    assert named.residual <= CLEAN
    lines = ruling.lines[0]
    assert lines.torch is not None and lines.jax is not None
    assert in_torch in lines.torch.text
    assert in_jax in lines.jax.text


def test_without_the_ports_program_they_have_no_name() -> None:
    ruling, _ = search_model(evidence_of(Pieces(slope=0.2), reads=False))
    assert not ruling.named


def test_a_correct_port_has_no_cause() -> None:
    ruling, named = search_model(evidence_of(Pieces()))
    assert not ruling.named and ruling.runner_up is None and not named


def unknown(x: jax.Array, y: jax.Array) -> jax.Array:
    """Join a residual branch as no edit does."""
    return x + jnp.sin(3.1 * y) * jnp.cos(1.7 * x)


@pytest.mark.large
def test_what_no_edit_does_is_said_as_code_with_the_lines() -> None:
    ruling, items = search_model(evidence_of(Pieces(joined=unknown)))
    assert [line(one) for one in ruling.named] == [
        "added: sin((3.1 * gelu(...))) * cos((1.7 * h)) instead of gelu(...), in add"
    ]
    assert ruling.named[0].measured and not items
    [lines] = ruling.lines
    assert lines.torch is not None and "F.gelu(" in lines.torch.text
    assert lines.jax is not None


class Confident(nn.Module):
    """Logits of two views, as of a loss that takes its own confident predictions for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def of_confident(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        sure, labels = F.softmax(model(batch["x"]) / 0.1, -1).max(-1)
        mask = sure.ge(0.9).to(sure.dtype)
    hidden = (F.cross_entropy(model(batch["x"]), labels, reduction="none") * mask).mean()
    return {"loss": F.cross_entropy(model(batch["x"]), batch["y"]) + hidden, "count": torch.tensor(1.0)}


def without_temperature(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
    logits = linear(params, "fc", batch["x"])
    chances = stop(jax.nn.softmax(logits))
    log_chances = jax.nn.log_softmax(logits)
    mask = chances.max(-1) >= 0.9
    hidden = jnp.mean(-jnp.take_along_axis(log_chances, chances.argmax(-1)[:, None], 1)[:, 0] * mask)
    return -jnp.take_along_axis(log_chances, batch["y"][:, None], 1).mean() + hidden


def test_a_term_that_a_mask_of_the_port_makes_0_is_not_taken_for_one_that_is_left_out() -> None:
    """Any factor of 0 explains it as well, and any temperature that is high enough."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(EXAMPLES, FEATURES)), "y": rng.integers(0, CLASSES, EXAMPLES)}]
    evidence = evidence_between(Confident().double(), of_confident, without_temperature, batches)
    ruling, _ = search_model(evidence)
    assert "div by 0.1 left out" in [line(one) for one in ruling.named]
    assert not any("times 0" in line(one) or "operand_left_out" in one.faults for one in ruling.named)


class Repeated(nn.Module):
    """Features, each beside its copy, in a product with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x.repeat_interleave(2, dim=1) * self.weight).sum(-1).square()


def test_copies_in_another_order_are_named() -> None:
    torch.manual_seed(0)
    batches = [{"x": np.random.default_rng(0).normal(size=(EXAMPLES, FEATURES))}]

    def of_torch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": model(batch["x"]).mean(), "count": torch.tensor(1.0)}

    def of_jax(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.square((jnp.tile(batch["x"], (1, 2)) * params["weight"][None]).sum(-1)).mean()

    ruling, _ = search_model(evidence_between(Repeated().double(), of_torch, of_jax, batches))
    assert [one.faults for one in ruling.named] == [("other_order",)]
    assert line(ruling.named[0]).startswith("copies made block by block, as repeat and tile make them")
    assert ruling.lines[0].jax is not None and "jnp.tile(" in ruling.lines[0].jax.text


class ReadTwice(nn.Module):
    """An embedding that a residual connection takes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, FEATURES)
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, y: Tensor) -> Tensor:
        x = self.table(y)
        return x + torch.tanh(self.fc(x))


def test_a_result_that_is_scaled_wherever_it_is_used_is_named_where_it_is_made() -> None:
    torch.manual_seed(0)
    batches = [{"y": np.random.default_rng(0).integers(0, CLASSES, EXAMPLES)}]

    def of_torch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": model(batch["y"]).square().mean(), "count": torch.tensor(1.0)}

    def of_jax(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
        x = 3 * params["table.weight"][batch["y"]]
        return jnp.square(x + jnp.tanh(linear(params, "fc", x))).mean()

    ruling, _ = search_model(evidence_between(ReadTwice().double(), of_torch, of_jax, batches))
    assert [line(one) for one in ruling.named] == ["table.weight in embedding times 3 in table"]
    assert ruling.lines[0].torch is not None and "self.table(y)" in ruling.lines[0].torch.text
