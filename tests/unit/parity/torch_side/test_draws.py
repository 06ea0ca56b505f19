"""Draws of torch: each function's numbers are noted, and then taken from the batch, also by autograd."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxddp.parity.port.draws import ENTRY, SERVED, Draw, Served
from jaxddp.parity.torch_side.draws import NotedDraws, ServedDraws

P = torch.tensor([0.2, 0.5, 0.9])
HALF = torch.full((3,), 0.5)
QUERY = torch.arange(24.0).reshape(1, 2, 3, 4) / 10


def noted(function: Callable[[], Any], model: nn.Module | None = None) -> list[Draw]:
    with NotedDraws(model or nn.Identity()) as mode:
        function()
    return mode.draws


def served(function: Callable[[], Any], *values: Any) -> Any:
    """Call a function whose draws are these numbers."""
    draws = noted(function)
    tensors = [torch.tensor(value, dtype=torch.get_default_dtype()) for value in values]
    batch = {f"{ENTRY}{k}": x.expand(draw.shape) for k, (x, draw) in enumerate(zip(tensors, draws, strict=True))}
    numbers = Served(batch, draws, "torch")
    with ServedDraws(numbers):
        result = function()
    numbers.check()
    return result


@pytest.mark.parametrize(
    ("function", "kind", "value", "result"),
    [
        (lambda: torch.randn(3), "normal", 2.0, [2.0] * 3),
        (lambda: torch.randn_like(P), "normal", 2.0, [2.0] * 3),
        (lambda: torch.empty(3).normal_(1, 3), "normal", 2.0, [7.0] * 3),
        (lambda: torch.empty(3).normal_(1), "normal", 2.0, [3.0] * 3),
        (lambda: torch.normal(P, 2 * torch.ones(3)), "normal", 2.0, [4.2, 4.5, 4.9]),
        (lambda: torch.normal(P, 2.0), "normal", 2.0, [4.2, 4.5, 4.9]),
        (lambda: torch.normal(1.0, P), "normal", 2.0, [1.4, 2.0, 2.8]),
        (lambda: torch.normal(1.0, 3.0, (3,)), "normal", 2.0, [7.0] * 3),
        (lambda: torch.distributions.Normal(P, 2.0).rsample(), "normal", 2.0, [4.2, 4.5, 4.9]),
        (lambda: torch.randn(3, generator=torch.Generator().manual_seed(0)), "normal", 2.0, [2.0] * 3),
        (lambda: torch.rand(3), "uniform", 0.25, [0.25] * 3),
        (lambda: torch.rand_like(P), "uniform", 0.25, [0.25] * 3),
        (lambda: torch.empty(3).uniform_(1, 3), "uniform", 0.25, [1.5] * 3),
        (lambda: torch.empty(3).uniform_(-1), "uniform", 0.25, [-0.5] * 3),
        (lambda: torch.distributions.Uniform(1.0, 3.0).rsample((3,)), "uniform", 0.25, [1.5] * 3),
        (lambda: torch.bernoulli(P), "bernoulli", 0.3, [0.0, 1.0, 1.0]),
        (lambda: torch.bernoulli(P, p=0.4), "bernoulli", 0.3, [1.0] * 3),
        (lambda: torch.empty(3).bernoulli_(0.2), "bernoulli", 0.3, [0.0] * 3),
        (lambda: torch.empty(3).bernoulli_(), "bernoulli", 0.3, [1.0] * 3),
        (lambda: P.clone().bernoulli_(P), "bernoulli", 0.3, [0.0, 1.0, 1.0]),
        (lambda: torch.distributions.Bernoulli(P).sample(), "bernoulli", 0.3, [0.0, 1.0, 1.0]),
        (lambda: F.dropout(P, 0.5), "bernoulli", 0.3, [0.4, 1.0, 1.8]),
        (lambda: F.dropout(P, 0.8), "bernoulli", 0.3, [0.0] * 3),
    ],
)
def test_each_function_returns_what_the_numbers_make(
    function: Callable[[], Any], kind: str, value: float, result: list[float]
) -> None:
    assert [(draw.kind, draw.shape, draw.refused) for draw in noted(function)] == [(kind, (3,), "")]
    assert served(function, value).tolist() == pytest.approx(result)


@pytest.mark.parametrize("drop", [F.dropout, lambda x, p: nn.Dropout(p, inplace=True)(1 * x)])
def test_gradients_pass_through_a_served_mask(drop: Callable[..., Tensor]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = served(lambda: drop(x, 0.75), [0.2, 0.3, 0.1])
    y.sum().backward()
    assert y.tolist() == [4.0, 0.0, 4.0]
    assert x.grad is not None and x.grad.tolist() == [4.0, 0.0, 4.0]


def test_gradients_pass_to_mean_and_deviation_of_a_sample() -> None:
    mean, deviation = (torch.ones(3, requires_grad=True) for _ in range(2))
    served(lambda: torch.distributions.Normal(mean, deviation).rsample(), [1.0, 2.0, 3.0]).sum().backward()
    assert (mean.grad.tolist(), deviation.grad.tolist()) == ([1.0] * 3, [1.0, 2.0, 3.0])  # type: ignore[union-attr]


def test_masks_of_channels_have_their_shape() -> None:
    assert noted(lambda: F.dropout2d(torch.ones(2, 3, 4, 5), 0.4))[0] == Draw("bernoulli", (2, 3, 1, 1), rate=0.6)


def test_attention_drops_weights() -> None:
    mask = (torch.arange(18).reshape(1, 2, 3, 3) % 3 == 0).float()
    weights = torch.softmax(QUERY @ QUERY.mT / 2, -1) * (1 - mask) / 0.75
    out = served(lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY, dropout_p=0.25), mask.tolist())
    assert torch.allclose(out, weights @ QUERY)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_draws_a_mask_of_its_weights(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
    (draw,) = noted(lambda: attention(QUERY[0], QUERY[0], QUERY[0], need_weights=need_weights), attention)
    assert (draw.kind, math.prod(draw.shape), draw.rate) == ("bernoulli", 2 * 2 * 3 * 3, 0.9)


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.dropout(P, 0.0),
        lambda: F.dropout(P, 1.0),
        lambda: torch.ops.aten.native_dropout(P, 0.0, True),  # dropout on a GPU
        lambda: torch.empty(3).bernoulli_(1.0),
        lambda: F.dropout(P, 0.5, training=False),
        lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY),
        lambda: torch.arange(3) + P.sum(),
    ],
)
def test_what_draws_nothing_is_not_noted(function: Callable[[], Any]) -> None:
    assert noted(function) == []


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: torch.randperm(4), "randperm"),
        (lambda: torch.randint(0, 3, (4,)), "randint"),
        (lambda: torch.multinomial(torch.ones(3), 2), "multinomial"),
        (lambda: F.gumbel_softmax(torch.ones(1, 4)), "exponential"),
    ],
)
def test_other_numbers_are_refused(function: Callable[[], Any], kind: str) -> None:
    (draw,) = noted(function)
    assert (draw.kind, "only normal, uniform, bernoulli" in draw.refused) == (kind, True)
    assert kind not in SERVED


class Block(nn.Module):
    """A dropout inside, and noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + torch.randn_like(x)


def test_the_innermost_layer_is_named() -> None:
    model = nn.ModuleDict({"block": Block()})
    draws = noted(lambda: model["block"](P) + torch.rand(3), model)
    places = {draw.kind: draw.where for draw in draws}
    assert places == {"bernoulli": "block.drop", "normal": "block", "uniform": ""}


def test_a_draw_that_is_computed_again_outside_of_the_loss_is_refused() -> None:
    block = Block()
    draws = noted(lambda: torch.utils.checkpoint.checkpoint(block, P, use_reentrant=False), block)
    assert [draw.where for draw in draws] == ["drop", ""]
    assert all(draw.refused.startswith("torch.utils.checkpoint computes it twice") for draw in draws)


def test_numbers_of_the_batch_are_those_of_both_dtypes() -> None:
    u = (np.arange(3) + 0.5) / 4
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(3, dtype=dtype)
        batch = {f"{ENTRY}0": torch.tensor(u, dtype=dtype)}
        with ServedDraws(Served(batch, [Draw("bernoulli", (3,))], "torch")):
            y = F.dropout(x, 0.5)
        assert y.dtype == dtype and y.tolist() == [2.0, 2.0, 0.0]
