"""Planted faults through the whole check: each found, named or left without a name; right ports equal.

One port of each fault, many of them with two at once; `make test-all` asks for each fault alone and for every pair,
`python -m benchmarks.scoreboard` for every port.
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
    """Pairs of which no two have a fault in common."""
    found: list[tuple[Scenario, str, str]] = []
    for pair in reversed(PAIRS):  # first those whose faults are of different stages
        if not {*map(fault_of, pair[1:])} & {fault_of(label) for other in found for label in other[1:]}:
            found.append(pair)
    return found


def or_large(quick: bool) -> Any:
    """The marks of a case that `make test` has, or else `make test-all` alone."""
    return () if quick else pytest.mark.large


TOGETHER = disjoint()
IN_PAIRS = {fault_of(label) for pair in TOGETHER for label in pair[1:]}
ALONE = [label for fault, label in ONE_OF_EACH.items() if fault not in IN_PAIRS]
# A fault that is found with nothing beside it has shown the rest of its port to be equal.
SEEN = {pair[0].name for pair in TOGETHER} | {PLANTED[label].scenarios[0].name for label in ALONE}
RIGHT = [pytest.param(name, marks=or_large(name not in SEEN or name in ("mlp", "tokens_global"))) for name in SETTINGS]
SINGLE = [pytest.param(label, marks=or_large(label in ALONE)) for label in ONE_OF_EACH.values()]
PAIRED = [pytest.param(*pair, marks=or_large(pair in TOGETHER), id="+".join(pair[1:])) for pair in PAIRS]


def asked(workers: Workers, scenario: Scenario, *labels: str) -> Score:
    accepted = tuple(frozenset({fault_of(label), *PLANTED[label].also}) for label in labels if label in PLANTED)
    port = PlantedPort(scenario, labels)
    numbers = scenario.world_size, scenario.steps
    return score(Question(port, "", scenario.name, scenario.optimizer, *numbers, accepted), workers, count_steps=False)


def test_every_fault_of_the_catalogue_is_planted() -> None:
    assert ONE_OF_EACH.keys() == FAULTS.keys() == IN_PAIRS | {fault_of(label) for label in ALONE}
    assert {name for planted in PLANTED.values() for name in planted.also} <= FAULTS.keys()
    assert not UNCATALOGUED.keys() & (FAULTS.keys() | PLANTED.keys())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_port_is_equal(name: str, workers: Workers) -> None:
    found = asked(workers, Scenario(name, "adamw"))
    assert found.verdict == "equal", found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("label", SINGLE)
def test_a_planted_fault_is_found_and_named(label: str, workers: Workers) -> None:
    found = asked(workers, PLANTED[label].scenarios[0], label)
    assert found.found and found.named, found
    stages = {stage for stage, *_ in found.where}
    # A step shows what it makes of a loss; the check judges the loss by itself, and then the step.
    assert stages == {PLANTED[label].stage} or (label.startswith(OWN_STEP) and stages == {"local_gradients"}), found


# Planted in a step of the port's own, whose loss is right.
OWN_STEP = ("stale_parameters", "mean_per_rank", "mean_per_micro_batch", "global_mean")


@pytest.mark.parametrize(("scenario", "one", "other"), PAIRED)
def test_two_faults_are_both_named(scenario: Scenario, one: str, other: str, workers: Workers) -> None:
    found = asked(workers, scenario, one, other)
    assert found.found and found.named, found


@pytest.mark.one_in(15)
@pytest.mark.parametrize("label", UNCATALOGUED)
def test_a_fault_without_a_name_is_found_and_located(label: str, workers: Workers) -> None:
    planted: Any = UNCATALOGUED[label]
    found = asked(workers, planted.scenarios[0], label)
    assert found.found and not any(found.said), found
    stage, step, tensor, layer = found.where[0]
    assert (stage, step) == (planted.stage, planted.step), found
    assert tensor.startswith(planted.tensor), found
    assert not planted.layer or layer == planted.layer, found
