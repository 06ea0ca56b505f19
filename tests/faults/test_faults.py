"""Tests of the planted faults themselves, and of the correct ports; test_planted.py checks the ports."""

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxddp.parity.compare.residuals import residuals
from tests.faults.planted import PAIRS, PlantedPort, fault_of, translated
from tests.faults.recipes import RECIPES, Optimizer
from tests.faults.scenarios import Scenario, Translation

UPDATES = 1e-12  # float64, ten steps with random gradients; measured: 9e-14, where torch computes 1 - beta2^t


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("matrices_only", [False, True])
def test_optimizers_without_faults_equal_torchs(name: str, matrices_only: bool) -> None:
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
        assert max(residuals(jax.device_get(updates), theirs).values()) < UPDATES
        params = {key: x.detach().numpy().copy() for key, x in zip(shapes, tensors, strict=True)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["tokens", "tokens_global", "tokens_sum"])
def test_replicas_and_micro_batches_have_unequal_numbers_of_labels(name: str, world_size: int) -> None:
    scenario = Scenario(name, world_size=world_size)
    port = scenario.port()
    for step in range(scenario.steps):
        ranks = [port.micro_batches(step, rank) for rank in range(world_size)]
        counts = np.array([[(part["y"] >= 0).sum() for part in parts] for parts in ranks])
        assert len(set(counts.sum(1))) > 1
        assert counts.shape[1] == 1 or all(len(set(of_rank)) > 1 for of_rank in counts)


def pieces(translation: Translation) -> dict[str, Any]:
    """Return everything that a fault can change, by name."""
    parts = {
        "": {field.name: getattr(translation, field.name) for field in dataclasses.fields(translation)},
        "step": vars(translation.custom_step),
        "optimizer": vars(translation.optimizer),
        "recipe": vars(translation.optimizer.recipe),
        "options": translation.options,
    }
    nested = {*parts, "shows"}
    return {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items() if name not in nested}


@pytest.mark.parametrize(("scenario", "one", "other"), PAIRS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_faults_of_a_pair_change_different_pieces(scenario: Scenario, one: str, other: str) -> None:
    right = pieces(scenario.translation())

    def changed(*labels: str) -> set[str]:
        return {name for name, value in pieces(translated(scenario, *labels)).items() if value != right.get(name)}

    assert changed(one) and changed(other) and not changed(one) & changed(other)
    assert changed(one, other) == changed(one) | changed(other)
    assert fault_of(one) != fault_of(other)


def test_pairs_are_distinct_and_ports_can_be_pickled() -> None:
    assert len({(scenario, fault_of(one), fault_of(other)) for scenario, one, other in PAIRS}) == len(PAIRS) >= 30
    port = PlantedPort(Scenario("mlp", "adamw"), ("sum_not_mean", "decay_value"))
    assert pickle.loads(pickle.dumps(port)) == port
    assert port.port().jax_step is not None
