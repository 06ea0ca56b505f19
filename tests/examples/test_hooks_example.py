"""Hooks of the gallery see, change and find the same in both frameworks, and other ones are noticed."""

import copy
import doctest

import jax
import pytest

from examples.gradient_hooks import __main__, in_torch, measured
from examples.gradient_hooks.measured import Found
from examples.gradient_hooks.settings import POISONED, REPLICAS
from jaxddp.distributed.replicas import Replicas

pytestmark = pytest.mark.large

OWN, ALIKE, MEAN, CLIPPED, EQUAL, LOGGED, TRACED, EARLY = range(8)


@pytest.fixture(scope="module")
def ours() -> Found:
    return measured.of_jax(Replicas(jax.devices()[:REPLICAS]))


@pytest.fixture(scope="module")
def theirs() -> Found:
    return measured.of_torch()


def failing(ours: Found, theirs: Found) -> list[int]:
    return [number for number, claim in enumerate(measured.claims(ours, theirs)) if not claim.holds]


def test_every_claim_holds(ours: Found, theirs: Found) -> None:
    assert not failing(ours, theirs)


def test_a_hook_on_the_wrong_side_of_the_mean_is_noticed(ours: Found, theirs: Found) -> None:
    wrong = copy.deepcopy(ours)
    wrong["clipped"]["local"] = wrong["clipped"]["mean"]
    assert failing(wrong, theirs) == [CLIPPED, EQUAL]


def test_hooks_that_see_no_mean_are_noticed(ours: Found, theirs: Found) -> None:
    """As if nothing had been sent."""
    wrong = copy.deepcopy(theirs)
    wrong["seen"]["mean"] = wrong["seen"]["local"]
    assert failing(ours, wrong) == [ALIKE, MEAN, EQUAL]


def test_another_log_is_noticed(ours: Found, theirs: Found) -> None:
    wrong = copy.deepcopy(theirs)
    wrong["logged"]["grad_log2/layers.1.bias/-8"] += 1
    assert failing(ours, wrong) == [LOGGED]


def test_a_nan_elsewhere_is_noticed(ours: Found, theirs: Found) -> None:
    wrong = ours | {"told": ours["told"].replace(POISONED, "layers.2.bias")}
    assert failing(wrong, theirs) == [TRACED]


def test_torch_sends_while_the_backward_pass_goes_on(theirs: Found) -> None:
    order = theirs["order"]
    assert order[0] == "layers.2.bias" and order.count(in_torch.SENT) > 1
    assert order.index(in_torch.SENT) < order.index("layers.0.weight")


def test_what_is_printed(ours: Found, theirs: Found, capsys: pytest.CaptureFixture[str]) -> None:
    __main__.show(ours, theirs)
    printed = capsys.readouterr().out
    assert printed.count(measured.expected()) == 2 and in_torch.SENT in printed and "█" in printed
    assert not doctest.testmod(__main__).failed
