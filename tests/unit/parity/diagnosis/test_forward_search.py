"""Search for faults planted in jax twins: how far it looks, and when it ends."""

from dataclasses import replace
from functools import partial

import pytest

from jaxddp.parity.report.sentences import line
from tests.support.rulings import check_named, explain_model
from tests.support.twin_models import MLP, TRANSFORMER
from tests.support.twins import evidence

pytestmark = pytest.mark.usefixtures("x64", "one_thread")


def test_a_search_that_was_cut_short_says_so() -> None:
    run = evidence(MLP, smoothing=0.2)
    assert explain_model(run, replays=0).cut_short
    assert not explain_model(run).cut_short


@pytest.mark.large
def test_one_fault_begins_where_the_layers_begin_to_differ() -> None:
    run = evidence(TRANSFORMER, eps0=1e-6, eps1=1e-3, steps=2)
    says = "LayerNorm eps {} in blocks.{}.norm1, the reference has 1e-05"
    both = f"{says.format(0.001, 1)}; {says.format('1e-06', 0)}"
    check_named(explain_model(replace(run, between=("embed", "blocks.0.norm1"))), ({"norm_epsilon"}, both))


@pytest.mark.large
def test_a_search_where_nothing_fits_ends_soon_if_the_layer_is_known() -> None:
    run = evidence(TRANSFORMER, residual=True, steps=2)
    known = replace(run, between=("blocks.1.fc2", "head"))  # measured: 473 replays, and more than 4,000 otherwise
    assert [explain_model(one, replays=600).cut_short for one in (run, known)] == [True, False]


@pytest.mark.large
def test_a_search_over_a_large_model_saves_replays_and_loses_no_name() -> None:
    run, here = evidence(TRANSFORMER, eps0=1e-6, steps=1), ("embed", "blocks.0.norm1")
    says = "LayerNorm eps 1e-06 in blocks.0.norm1, the reference has 1e-05"
    replays = []
    for options in ({}, {"thrifty": True}, {"thrifty": True, "between": here}):
        alive: list[None] = []
        ruling = explain_model(replace(run, alive=partial(alive.append, None), **options))
        check_named(ruling, ({"norm_epsilon"}, says))
        # A value that was not fitted is still the reference's, and would say nothing.
        assert ruling.runner_up is not None and "LayerNorm eps 1e-05" not in line(ruling.runner_up)
        replays.append(len(alive))
    assert replays[0] > replays[1] > 2 * replays[2]  # measured: 157, 84, 22


@pytest.mark.large
def test_a_fault_that_a_later_step_contradicts_is_not_named_alone() -> None:
    """Row 0 of the embedding is not read in the first step, so GELU alone explains that step."""
    run = evidence(TRANSFORMER, gelu="everywhere", padding_idx=True, without_padding_at=0, steps=2)
    ruling = explain_model(run)
    (named,) = ruling.named
    assert set(named.faults) == {"gelu_approximation", "padding_idx"}
