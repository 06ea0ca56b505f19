"""Changes of single calls: divisors of deviations, terms of clipped losses, clamps, and where padding can be 'SAME'."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.call_changes import chosen_term, clamps
from jaxddp.parity.diagnosis.forward.call_trace import CallTrace
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change
from jaxddp.parity.diagnosis.forward.layout import same_padding
from jaxddp.parity.diagnosis.forward.sites import patches_of, trace
from jaxddp.parity.diagnosis.forward.statistics import deviation
from jaxddp.parity.report.sentences import line, sentence

X = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).reshape(3, 4) ** 3
Y = X.flip(0)
CLOSE = partial(torch.testing.assert_close, rtol=1e-14, atol=0.0)  # measured: 3e-16


def changed(of_call: Callable[[Call], Iterator[Change]], function: Callable[[], Any]) -> dict[str, Any]:
    """Return what the function returns with each change planted, by the change in words."""
    calls = trace(nn.Identity(), lambda model, batch: function(), {})
    patches = patches_of((call, change) for call in calls for change in of_call(call))
    results = {}
    for patch in patches:
        with CallTrace([patch]):
            results[sentence(patch.change.what)] = function()
    return results


@pytest.mark.parametrize(
    ("function", "what", "expected"),
    [
        (lambda: torch.std(X), "standard deviation with divisor n instead of n - 1", X.std(correction=0)),
        (lambda: X.std(), "standard deviation with divisor n instead of n - 1", X.std(correction=0)),
        (lambda: X.std(False), "standard deviation with divisor n - 1 instead of n", X.std()),
        (lambda: X.std(1), "standard deviation with divisor n instead of n - 1", X.std(1, correction=0)),
        (lambda: X.std((0, 1), True), "standard deviation with divisor n instead of n - 1", X.std(correction=0)),
        (lambda: X.var(0, False), "variance with divisor n - 1 instead of n", X.var(0)),
        (
            lambda: torch.var(X, dim=1, keepdim=True, correction=0),
            "variance with divisor n - 1 instead of n",
            X.var(1, keepdim=True),
        ),
        (lambda: torch.var(X, unbiased=False), "variance with divisor n - 1 instead of n", X.var()),
    ],
)
def test_a_deviation_gets_the_other_divisor(function: Callable[[], Tensor], what: str, expected: Tensor) -> None:
    results = changed(deviation, function)
    assert [*results] == [what]
    CLOSE(results[what], expected)


@pytest.mark.parametrize("function", [torch.std_mean, torch.var_mean])
def test_the_mean_beside_a_deviation_stays(function: Callable[..., Any]) -> None:
    ((spread, mean),) = changed(deviation, lambda: function(X, 1)).values()
    CLOSE(spread, function(X, 1, correction=0)[0])
    assert torch.equal(mean, X.mean(1))


@pytest.mark.parametrize(
    "function",
    [lambda: X[:1].std(0, correction=0), lambda: torch.var(X, correction=2), lambda: X.mean(), lambda: X.norm()],
)
def test_no_other_divisor_of_one_value_or_of_other_functions(function: Callable[[], Tensor]) -> None:
    assert changed(deviation, function) == {}


@pytest.mark.parametrize("function", [torch.max, torch.maximum, Tensor.max, Tensor.maximum])
def test_the_larger_of_two_is_replaced(function: Callable[..., Tensor]) -> None:
    results = changed(chosen_term, lambda: function(X, Y))
    wanted = {"smaller": torch.minimum(X, Y), "first": X, "second": Y}
    assert [*results] == [f"the {which} of two values instead of the larger" for which in wanted]
    assert all(torch.equal(result, value) for result, value in zip(results.values(), wanted.values(), strict=True))


def test_the_smaller_of_two_is_replaced_and_a_number_broadcast() -> None:
    low = torch.tensor(1.0, dtype=torch.float64)
    results = changed(chosen_term, lambda: torch.min(X, other=low))
    assert torch.equal(results["the larger of two values instead of the smaller"], X.clamp(min=1.0))
    assert torch.equal(results["the second of two values instead of the smaller"], torch.ones_like(X))


@pytest.mark.parametrize(
    "function", [lambda: torch.max(X), lambda: X.max(1), lambda: torch.maximum(X.long(), Y.long()), lambda: X.amax(0)]
)
def test_no_other_term_of_one_tensor_or_of_whole_numbers(function: Callable[[], Any]) -> None:
    assert changed(chosen_term, function) == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.clamp(X, -1, 1),
        lambda: X.clamp(-1, max=1),
        lambda: X.clip(min=-1, max=1),
        lambda: X.clone().clamp_(-1, 1),
    ],
)
def test_a_clamp_is_left_out_in_whole_or_in_half(function: Callable[[], Tensor]) -> None:
    results = changed(clamps, function)
    wanted = {"": X, " from below": X.clamp(max=1), " from above": X.clamp(min=-1)}
    assert [*results] == [f"values not clamped{half}" for half in wanted]
    assert all(torch.equal(result, value) for result, value in zip(results.values(), wanted.values(), strict=True))


def test_a_clamp_with_one_bound_is_left_out_in_whole_only() -> None:
    assert [*changed(clamps, lambda: X.clamp(min=0))] == ["values not clamped"]
    assert changed(clamps, lambda: X.long().clamp(min=0)) == {}


def stages(count: int) -> nn.Sequential:
    """Return strided convolutions, and a pooling."""
    convolutions = [nn.Conv2d(1, 1, 3, stride=2, padding=1) for _ in range(count)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(3, stride=2, padding=1))


def same_in(module: nn.Module, size: int) -> list[str]:
    calls = trace(module, lambda model, batch: {"loss": model(batch["x"]).sum()}, {"x": torch.ones(1, 1, size, size)})
    return [line(patch) for patch in patches_of((call, change) for call in calls for change in same_padding(call))]


def test_same_padding_is_tried_in_every_set_of_a_few_layers() -> None:
    says = same_in(stages(2), 16)
    what, pool = "convolution padded 'SAME', (0, 1, 0, 1) in", "max pooling padded 'SAME', (0, 1, 0, 1) in"
    assert sorted(says) == sorted(
        [
            "layers padded 'SAME'",
            f"{what} layer 0 and layer 1",
            "layers padded 'SAME' in layer 0 and layer 2",
            "layers padded 'SAME' in layer 1 and layer 2",
            *(f"{what} layer 0", f"{what} layer 1", f"{pool} layer 2"),
        ]
    )


def test_same_padding_of_many_layers_is_tried_by_kind_and_in_all_but_one() -> None:
    says = same_in(stages(6), 256)
    assert len(says) == 1 + 7 + 7  # all; all but one, of which one leaves the pooling out; each alone
    assert "convolution padded 'SAME', (0, 1, 0, 1) in layer 0, layer 1, layer 2, layer 3, layer 4 and layer 5" in says


def test_gradients_are_computed_after_a_fault_in_the_end_of_a_no_grad_block() -> None:
    stays = Change("stays", Statement(""), lambda call, proceed, _: proceed(call.put(0, False)))
    with CallTrace([CallEdit(stays, frozenset({("_set_grad_enabled", 1)}))]):
        with torch.no_grad():
            X.sum()
        assert not torch.is_grad_enabled()  # else the fault is not planted
    assert torch.is_grad_enabled()
