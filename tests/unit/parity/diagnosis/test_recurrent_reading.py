"""Faults of hand-written recurrent cells are found inside of torch's fused layers."""

import jax
import pytest
from jax import numpy as jnp

from jaxddp.parity.diagnosis.forward.loss_causes import search_model
from jaxddp.parity.report.sentences import line
from tests.support.recurrent_programs import Pieces, State, evidence_of

CLEAN = 1e-14  # measured: up to 4e-16
sigmoid = jax.nn.sigmoid


def without_tanh(i: jax.Array, f: jax.Array, g: jax.Array, o: jax.Array, c: jax.Array) -> State:
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * c, c


def in_another_order(i: jax.Array, g: jax.Array, f: jax.Array, o: jax.Array, c: jax.Array) -> State:
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def with_a_forget_bias(i: jax.Array, f: jax.Array, g: jax.Array, o: jax.Array, c: jax.Array) -> State:
    c = sigmoid(f + 1) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


# Pieces of the port, name of the fault, what is said.
CASES = {
    "order of the gates": (
        Pieces(cell=in_another_order),
        "other_order",
        "the parts of chunk of the gates in the order (0, 2, 1, 3)",
    ),
    "tanh left out": (Pieces(cell=without_tanh), "call_left_out", "tanh of the cell state left out"),
    "reset before the product": (
        Pieces(product=lambda r, h, w, b: (r * h) @ w.T + b),
        "call_moved",
        "linear of the state in the candidate after mul of the reset gate and the state instead of before",
    ),
    "a number added": (
        Pieces(cell=with_a_forget_bias),
        "addend",
        "the result of chunk of the gates in sigmoid of the forget gate plus 1",
    ),
    "gates exchanged": (
        Pieces(mixed=lambda z, n, h: z * n + (1 - z) * h),
        "other_operand",
        "the result of tanh of the candidate and the result of select of the state exchanged between mul of the update "
        "gate and the candidate and mul of the update gate and the old state",
    ),
    "state reset": (
        Pieces(carried=lambda state: jax.tree.map(jnp.zeros_like, state)),
        "other_operand",
        "zeros in place of the state that lstm is given in lstm",
    ),
    "not turned back": (
        Pieces(both=lambda one, other, x: [one(x), other(x[::-1])]),
        "call_left_out",
        "flip of the outputs of the direction backwards left out in gru",
    ),
    "read forwards twice": (
        Pieces(both=lambda one, other, x: [one(x), other(x)]),
        "call_left_out",
        "flip left out: the direction backwards reads forwards",
    ),
    "directions in another order": (
        Pieces(both=lambda one, other, x: [other(x[::-1])[::-1], one(x)]),
        "other_order",
        "cat of both directions in the order the result of flip of the outputs of the direction backwards, the result "
        "of stack of the outputs in gru",
    ),
    "mean of all elements": (
        Pieces(mean=lambda losses, valid: losses.mean()),
        "other_expression",
        "the mean of losses over all elements (42 in number) in place of the result of div",
    ),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", CASES)
def test_a_fault_of_a_cell_is_named(case: str) -> None:
    pieces, fault, says = CASES[case]
    ruling, _ = search_model(evidence_of(pieces))
    [named] = ruling.named
    assert (named.faults, line(named)) == ((fault,), says)
    assert named.residual <= CLEAN


def test_a_correct_port_has_no_cause() -> None:
    ruling, named = search_model(evidence_of(Pieces()))
    assert not ruling.named and ruling.runner_up is None and not named
