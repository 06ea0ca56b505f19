"""Hypotheses of another dropout rate: only rates that JAX's masks have, and only where torch has the reference's."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.diagnosis.forward.call_changes import dropout_rate
from jaxddp.parity.diagnosis.forward.call_trace import CallTrace
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.forward.sites import patches_of, trace
from jaxddp.parity.port.draws import ENTRY, Draw, Pair, Served, rates_of
from jaxddp.parity.report.sentences import sentence
from jaxddp.parity.torch_side.draws import ServedDraws

RATES = ((0.25, 0.5), (0.25, 0.25), (0.1, 0.3))
X = torch.arange(24.0).reshape(1, 2, 3, 4) / 10


def changes_of(function: Callable[[Tensor], Tensor]) -> list[tuple[Any, Any]]:
    """Return the calls of a loss that may have another rate, each with its change."""
    calls = trace(nn.Identity(), lambda model, batch: {"loss": function(batch["x"]).sum()}, {"x": X})
    return [(call, change) for call in calls for change in dropout_rate(call, RATES)]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: F.dropout(x, 0.25), ["dropout rate 0.5 instead of 0.25"]),
        (lambda x: F.dropout2d(x, p=0.1), ["dropout rate 0.3 instead of 0.1"]),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), ["dropout rate 0.3 instead of 0.1"]),
        (lambda x: F.dropout(x, 0.2), []),  # no mask of JAX's is paired with one of this rate
        (lambda x: F.dropout(x, 0.25, training=False), []),
        (lambda x: F.scaled_dot_product_attention(x, x, x), []),
        (lambda x: F.relu(x), []),
    ],
)
def test_rates_of_jaxs_masks_are_tried(function: Callable[[Tensor], Tensor], says: list[str]) -> None:
    assert [sentence(change.what) for _, change in changes_of(function)] == says


def check_planted(patch: CallEdit, drop: Callable[[Tensor, float], Tensor], *shapes: tuple[int, ...]) -> None:
    """Check that a patch makes of a rate of 0.25 one of 0.5, for masks of these shapes."""
    draws = [Draw("bernoulli", shape) for shape in shapes]
    numbers = {
        f"{ENTRY}{k}": torch.linspace(0.01, 0.99, math.prod(shape)).reshape(shape) for k, shape in enumerate(shapes)
    }

    def loss(rate: float) -> Tensor:
        with ServedDraws(Served(numbers, draws, "torch")):
            return drop(X, rate)

    with CallTrace([patch]):
        planted = loss(0.25)
    assert torch.equal(planted, loss(0.5)) and not torch.equal(planted, loss(0.25))


@pytest.mark.parametrize(
    ("drop", "shape"),
    [
        (F.dropout, tuple(X.shape)),
        (lambda x, rate: F.scaled_dot_product_attention(x, x, x, dropout_p=rate), (1, 2, 3, 3)),
    ],
    ids=["mlp", "sdpa"],
)
def test_a_planted_rate_is_the_loss_at_that_rate(drop: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    ((call, change),) = changes_of(lambda x: drop(x, 0.25))
    check_planted(CallEdit(change, frozenset({call.site})), drop, shape)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_a_recorded_call_takes_the_numbers_that_it_would_draw(rate: float, inplace: bool) -> None:
    numbers, draws = torch.linspace(0.01, 0.99, X.numel()).reshape(X.shape), [Draw("bernoulli", tuple(X.shape))]
    results = []
    calls = CallTrace(modules=[], reads=True)
    recordings: tuple[AbstractContextManager[object], ...] = (nullcontext(), calls)
    for recording in recordings:
        with ServedDraws(Served({f"{ENTRY}0": numbers}, draws, "torch")), recording:
            results.append(F.dropout(X.clone(), rate, True, inplace))
    assert torch.equal(*results)
    (call,) = (call for call in calls.recorded if call.name == "dropout")
    assert (call.get("numbers") is numbers) == (rate == 0.25)
    again = call.run() if rate == 0.25 and not inplace else results[0]
    assert torch.equal(again, results[0])


def test_outside_of_served_draws_torch_draws_the_mask() -> None:
    with CallTrace(modules=[], reads=True) as calls:
        F.dropout(X, 0.25)
    assert calls.recorded[-1].get("numbers") is None


RNN = nn.LSTM(4, 4, num_layers=2, batch_first=True)


def mixed(x: Tensor, rate: float) -> Tensor:
    """Drop out by functions whose parameters for the rate are called p, dropout_p and dropout."""
    RNN.dropout = rate
    y = F.scaled_dot_product_attention(x, x, x, dropout_p=rate)
    return F.dropout(RNN(y[0])[0], rate)


def test_one_rate_is_planted_in_layers_of_several_kinds() -> None:
    changes = changes_of(lambda x: mixed(x, 0.25))
    assert [call.name for call, _ in changes] == ["scaled_dot_product_attention", "lstm", "dropout"]
    (whole,) = (patch for patch in patches_of(changes) if len(patch.sites) == 3)
    check_planted(whole, mixed, (1, 2, 3, 3), (3, 2, 4), (2, 3, 4))


def test_rates_are_those_of_masks_with_one_rate() -> None:
    mask, other, free = (Draw("bernoulli", (3,), rate=rate) for rate in (0.75, 0.5, None))
    noise = Draw("normal", (3,))
    assert rates_of([Pair(mask, other), Pair(mask, free), Pair(noise, noise)]) == ((0.25, 0.5),)
