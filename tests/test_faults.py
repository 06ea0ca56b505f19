"""The planted faults themselves: the ports are right without them, and none is void."""

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from faults import planted_optimizer, rehearsal, rehearsal_torch
from faults.planted import PAIRS, PLANTED, PlantedPort, fault_of, translated
from faults.recipes import RECIPES, Optimizer
from faults.scenarios import SETTINGS, Scenario, Translation
from faults.uncatalogued import UNCATALOGUED

from jaxddp.parity.convert import Converter
from jaxddp.parity.diagnosis.catalogue import FAULTS

FIRST = 1e-13  # of a stage, in the first step; measured: 2e-14
LATER = 1e-12  # of a stage, both running by themselves for ten steps; measured: 2e-14
UPDATES = 1e-12  # of ten steps, from random gradients; measured: 9e-14, where torch takes 1 - beta2^t


@pytest.fixture(autouse=True)
def float64_soon_compiled() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def to_torch(converter: Converter, stage: str, value: Any) -> Any:
    """A rehearsed stage as torch has it: per replica, or replica 0's."""
    if stage == "local_loss":
        return np.asarray(value)
    of_each = [converter.to_torch({name: x[rank] for name, x in value.items()}) for rank in range(2)]
    if stage == "local_gradients":
        return {name: np.stack([of[name] for of in of_each]) for name in of_each[0]}
    return of_each[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_port_without_faults_does_as_torch(name: str) -> None:
    scenario = Scenario(name, "adamw")
    converter = rehearsal.converter(scenario.translation())
    mine = rehearsal.reference(scenario).stages
    for number, theirs in enumerate(rehearsal_torch.run(scenario)):
        for stage in rehearsal.ORDER:
            value = theirs[stage]
            found = to_torch(converter, stage, mine[number][stage])
            assert rehearsal.distance(found, value) < (LATER if number else FIRST), (number, stage)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", SETTINGS)
def test_clipping_is_active_at_some_steps_and_not_at_others(name: str, optimizer: str) -> None:
    scenario = Scenario(name, optimizer)
    norms = [stages["norm"] for stages in rehearsal_torch.run(scenario)]
    assert min(norms) < scenario.setting.clip_grad_norm < max(norms)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("matrices_only", [False, True])
def test_an_optimizer_without_faults_does_as_torch(name: str, matrices_only: bool) -> None:
    recipe = dataclasses.replace(RECIPES[name], matrices_only=matrices_only)
    rng = np.random.default_rng(0)
    shapes = {"weight": (4, 3), "bias": (4,)}
    params = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    tensors = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value in params.values()]
    optimizer = recipe.torch_optimizer(tensors)
    scheduler = recipe.torch_scheduler(optimizer)
    chain = Optimizer(recipe).build()
    update, state = jax.jit(chain.update), chain.init(params)
    for _ in range(10):
        gradients = {key: rng.normal(size=shape) for key, shape in shapes.items()}
        before = [tensor.detach().clone() for tensor in tensors]
        for tensor, gradient in zip(tensors, gradients.values(), strict=True):
            tensor.grad = torch.from_numpy(gradient)
        optimizer.step()
        scheduler.step()
        theirs = {key: (x.detach() - b).numpy() for key, x, b in zip(shapes, tensors, before, strict=True)}
        updates, state = update(gradients, state, params)
        assert rehearsal.distance(updates, theirs) < UPDATES
        params = {key: x.detach().numpy().copy() for key, x in zip(shapes, tensors, strict=True)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["tokens", "tokens_global", "tokens_sum"])
def test_replicas_and_micro_batches_have_unequal_numbers_of_labels(name: str, world_size: int) -> None:
    scenario = Scenario(name, world_size=world_size)
    for step in range(scenario.steps):
        counts = rehearsal_torch.valid_labels(scenario, step)
        assert len(set(counts.sum(1))) > 1
        assert counts.shape[1] == 1 or all(len(set(of_rank)) > 1 for of_rank in counts)


def test_every_fault_of_the_catalogue_is_planted() -> None:
    assert {fault_of(label) for label in PLANTED} == set(FAULTS)
    assert {name for planted in PLANTED.values() for name in planted.also} <= set(FAULTS)
    assert not set(UNCATALOGUED) & (set(FAULTS) | set(PLANTED))


@pytest.mark.parametrize("label", PLANTED)
def test_a_planted_fault_shows_first_at_its_stage(label: str) -> None:
    planted = PLANTED[label]
    # What is not of the optimizer costs a compilation per scenario, and the first tells as much as all.
    for scenario in planted.scenarios if label in planted_optimizer.PLANTED else planted.scenarios[:1]:
        found = rehearsal.first_difference(translated(scenario, label))
        assert found is not None and found[1] == planted.stage, (scenario, found)


@pytest.mark.parametrize("label", UNCATALOGUED)
def test_a_fault_without_a_name_shows_first_at_its_stage(label: str) -> None:
    planted = UNCATALOGUED[label]
    scenario = planted.scenarios[0]
    found = rehearsal.first_difference(translated(scenario, label))
    assert found == (planted.step, planted.stage)


def pieces(translation: Translation) -> dict[str, Any]:
    """Everything that a fault can change, by name."""
    parts = {
        "": {field.name: getattr(translation, field.name) for field in dataclasses.fields(translation)},
        "step": vars(translation.own_step),
        "optimizer": vars(translation.optimizer),
        "recipe": vars(translation.optimizer.recipe),
        "options": translation.options,
    }
    nested = {*parts, "shows"}
    return {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items() if name not in nested}


@pytest.mark.parametrize(("scenario", "one", "other"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_faults_of_a_pair_do_not_touch_each_other(scenario: Scenario, one: str, other: str) -> None:
    right = pieces(scenario.translation())

    def changed(*labels: str) -> set[str]:
        return {name for name, value in pieces(translated(scenario, *labels)).items() if value != right.get(name)}

    assert changed(one) and changed(other) and not changed(one) & changed(other)
    assert changed(one, other) == changed(one) | changed(other)
    assert fault_of(one) != fault_of(other)


def test_there_are_thirty_pairs_and_all_ports_cross_to_other_processes() -> None:
    assert len({(scenario, fault_of(one), fault_of(other)) for scenario, one, other in PAIRS}) == 30
    port = PlantedPort(Scenario("mlp", "adamw"), ("sum_not_mean", "decay_value"))
    assert pickle.loads(pickle.dumps(port)) == port
    assert port.port().flax_step is not None
