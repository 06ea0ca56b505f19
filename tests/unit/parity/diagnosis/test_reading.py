"""Faults outside of the catalogue are found from where the two programs part, with their lines on both sides."""

from dataclasses import replace

import jax
import pytest
from jax import numpy as jnp

from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from tests.support.read_programs import Pieces, evidence_of, stop

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
        ("F.gelu(", "return x @"),
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
        ("self.norm(", "return x @"),
    ),
    "stopped": (
        Pieces(inner=stop),
        ("gradient_stopped",),
        "no gradient reaches the result of layer_norm in linear in fc2",
        ("self.fc2(", "return x @"),
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_lines(case: str) -> None:
    pieces, faults, says, (in_torch, in_jax) = CASES[case]
    ruling, _ = search_model(evidence_of(pieces))
    [named] = ruling.named
    assert (named.faults, named.says) == (faults, says)
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("pieces", "partly"),
    [
        (Pieces(slope=0.2), "leaky_relu's negative_slope 0.2, the reference has 0.01"),
        (
            Pieces(slope=0.2, eps=1e-6),
            "leaky_relu's negative_slope 0.2, the reference has 0.01; "
            "LayerNorm eps 1e-06 in norm, the reference has 1e-05",
        ),
        (Pieces(), ""),
    ],
    ids=["one", "two", "none"],
)
def test_a_fault_that_remains_beside_others_is_told(pieces: Pieces, partly: str) -> None:
    ruling, _ = search_model(evidence_of(replace(pieces, joined=unknown)))
    assert not ruling.named and ruling.partly == partly
    assert not search_model(evidence_of(pieces))[0].partly


def unknown(x: jax.Array, y: jax.Array) -> jax.Array:
    """Join a residual branch as no edit does."""
    return x + jnp.sin(3.1 * y) * jnp.cos(1.7 * x)


def test_an_unexplained_difference_has_the_lines_where_the_programs_part() -> None:
    ruling, _ = search_model(evidence_of(Pieces(joined=unknown)))
    assert not ruling.named
    [lines] = ruling.lines
    assert lines.torch is not None and "F.gelu(" in lines.torch.text
    assert lines.jax is not None
