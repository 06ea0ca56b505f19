"""Whole checks of ports with planted faults, which must be detected and named, and of correct ports.

`make test` checks pairs of faults: a third of the MLP's, and one of the convnet and of the decoder, which take longer
to compile. `make test-all` checks each fault alone and every pair, `python -m benchmarks.scoreboard` every port.
"""

from typing import Any

import pytest

from benchmarks.scoreboard.score import Question, Score, score
from jaxddp.parity.catalogue import FAULTS
from jaxddp.parity.workers import Workers
from tests.faults.planted import PAIRS, PLANTED, PlantedPort, fault_of
from tests.faults.scenarios import SETTINGS, Scenario
from tests.faults.uncatalogued import UNCATALOGUED

ONE_OF_EACH = {fault_of(label): label for label in reversed(PLANTED)}  # the first label of each fault


def disjoint() -> list[tuple[Scenario, str, str]]:
    """Return pairs of which no two share a fault."""
    chosen: list[tuple[Scenario, str, str]] = []
    for pair in reversed(PAIRS):  # pairs in different stages first
        if not {*map(fault_of, pair[1:])} & {fault_of(label) for other in chosen for label in other[1:]}:
            chosen.append(pair)
    return chosen


def or_large(quick: bool) -> Any:
    """Return the marks of a case for `make test` if `quick`, for `make test-all` otherwise."""
    return () if quick else pytest.mark.large


TOGETHER = disjoint()
IN_PAIRS = {fault_of(label) for pair in TOGETHER for label in pair[1:]}
ALONE = [label for fault, label in ONE_OF_EACH.items() if fault not in IN_PAIRS]
SINGLE = [pytest.param(label, marks=or_large(label in ALONE)) for label in ONE_OF_EACH.values()]
QUICK = [
    *[pair for pair in TOGETHER if pair[0].name in ("mlp", "mlp_groups")][::12],
    *(next(pair for pair in TOGETHER if pair[0].name == name) for name in ("convnet", "tokens")),
]
PAIRED = [pytest.param(*pair, marks=or_large(pair in QUICK), id="+".join(pair[1:])) for pair in PAIRS]


def score_of(workers: Workers, scenario: Scenario, *labels: str, count_steps: bool = False) -> Score:
    """Check the scenario's port with faults, and score the result."""
    accepted = tuple(frozenset({fault_of(label), *PLANTED[label].also}) for label in labels if label in PLANTED)
    port = PlantedPort(scenario, labels)
    numbers = scenario.world_size, scenario.steps
    return score(Question(port, "", scenario.name, scenario.optimizer, *numbers, accepted), workers, count_steps)


def test_every_fault_of_the_catalogue_is_planted() -> None:
    assert ONE_OF_EACH.keys() == FAULTS.keys() == IN_PAIRS | {fault_of(label) for label in ALONE}
    assert {name for planted in PLANTED.values() for name in planted.also} <= FAULTS.keys()
    assert not UNCATALOGUED.keys() & (FAULTS.keys() | PLANTED.keys())


@pytest.mark.large
@pytest.mark.parametrize("name", SETTINGS)
def test_a_correct_port_is_equal(name: str, workers: Workers) -> None:
    result = score_of(workers, Scenario(name, "adamw"))
    assert result.verdict == "equal", result


@pytest.mark.one_in(30, first=2)
@pytest.mark.parametrize("label", SINGLE)
def test_a_planted_fault_is_detected_and_named(label: str, workers: Workers) -> None:
    result = score_of(workers, PLANTED[label].scenarios[0], label)
    assert result.found and result.named, result
    stages = {stage for stage, *_ in result.where}
    # The check compares the loss outside the port's step; a fault of the step then shows first in the gradients.
    assert stages == {PLANTED[label].stage} or (label.startswith(OWN_STEP) and stages == {"local_gradients"}), result


# Planted in the port's replica step; the loss is correct.
OWN_STEP = ("stale_parameters", "mean_per_rank", "mean_per_micro_batch", "global_mean")


@pytest.mark.parametrize(("scenario", "one", "other"), PAIRED)
def test_two_faults_are_both_named(scenario: Scenario, one: str, other: str, workers: Workers) -> None:
    result = score_of(workers, scenario, one, other)
    assert result.found and result.named, result


def test_the_steps_that_a_name_needs_are_counted(workers: Workers) -> None:
    assert score_of(workers, Scenario("mlp", "sgd"), "betas/momentum", count_steps=True).steps == 1


@pytest.mark.one_in(34)
@pytest.mark.parametrize("label", UNCATALOGUED)
def test_a_fault_outside_the_catalogue_is_detected_and_located(label: str, workers: Workers) -> None:
    planted: Any = UNCATALOGUED[label]
    result = score_of(workers, planted.scenarios[0], label)
    assert result.found and tuple(name for names in result.said for name in names) == planted.named, result
    stage, step, tensor, layer = result.where[0]
    assert (stage, step) == (planted.stage, planted.step), result
    assert tensor.startswith(planted.tensor), result
    assert not planted.layer or layer == planted.layer, result
