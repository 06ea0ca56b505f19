"""Gradient hooks example: both frameworks' hooks agree, and claims fail for planted differences."""

import copy

import jax
import pytest

from examples.gradient_hooks import measured
from examples.gradient_hooks.measured import Results
from examples.gradient_hooks.settings import POISONED, REPLICAS
from jaxddp.distributed.replicas import Replicas

pytestmark = pytest.mark.large

OWN, ALIKE, MEAN, CLIPPED, EQUAL, LOGGED, TRACED, EARLY = range(8)


@pytest.fixture(scope="module")
def ours() -> Results:
    return measured.of_jax(Replicas(jax.devices()[:REPLICAS]))


@pytest.fixture(scope="module")
def theirs() -> Results:
    return measured.of_torch()


def failing(ours: Results, theirs: Results) -> list[int]:
    return [number for number, claim in enumerate(measured.claims(ours, theirs)) if not claim.holds]


def test_claims_fail_for_a_hook_on_the_wrong_side_of_the_mean(ours: Results, theirs: Results) -> None:
    wrong = copy.deepcopy(ours)
    wrong["clipped"]["local"] = wrong["clipped"]["mean"]
    assert failing(wrong, theirs) == [CLIPPED, EQUAL]


def test_claims_fail_for_gradients_that_were_not_averaged(ours: Results, theirs: Results) -> None:
    wrong = copy.deepcopy(theirs)
    wrong["seen"]["mean"] = wrong["seen"]["local"]
    assert failing(ours, wrong) == [ALIKE, MEAN, EQUAL]


def test_claims_fail_for_a_different_histogram(ours: Results, theirs: Results) -> None:
    wrong = copy.deepcopy(theirs)
    wrong["logged"]["grad_log2/layers.1.bias/-8"] += 1
    assert failing(ours, wrong) == [LOGGED]


def test_claims_fail_for_a_nan_traced_to_another_parameter(ours: Results, theirs: Results) -> None:
    wrong = ours | {"nan_report": ours["nan_report"].replace(POISONED, "layers.2.bias")}
    assert failing(wrong, theirs) == [TRACED]
