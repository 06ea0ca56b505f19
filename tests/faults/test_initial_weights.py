"""The initialisation of correct ports raises no alarm when both sides draw as torch does, under other seeds."""

import pytest

from jaxddp.parity.initial_draws import DRAWS
from jaxddp.parity.initialisation import compared
from jaxddp.parity.torch_side.initial_weights import TorchInitialWeights

from .planted import PlantedPort
from .scenarios import Scenario

# The models of the scoreboard's correct ports.
MODELS = ("mlp", "tokens", "convnet", "tokens_global", "mlp_accumulated", "mlp_groups")
RUNS = 3


def alarms(model: str, seed: int) -> list[tuple[str, ...]]:
    """Return what is said of a model that draws alike on both sides, in three runs of other seeds."""
    source = PlantedPort(Scenario(model, seed=seed))
    seeds = range(2 * RUNS * seed, 2 * RUNS * (seed + 1))
    jobs = (TorchInitialWeights(source, DRAWS, number) for number in seeds)
    sides = [job.run(None, lambda where: None) for job in jobs]  # type: ignore[arg-type]
    pairs = zip(sides[::2], sides[1::2], strict=True)
    aspects = [compared(torch, jax, names) for (torch, names), (jax, _) in pairs]
    return [aspect.says for aspect in aspects if aspect.verdict != "equal"]


@pytest.mark.parametrize("model", MODELS[:3])
def test_a_model_that_draws_as_torch_does_raises_no_alarm(model: str) -> None:
    assert alarms(model, 0) == []


@pytest.mark.large
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_correct_ports_raise_no_alarm_in_three_runs(seed: int) -> None:
    assert alarms(MODELS[seed % len(MODELS)], seed) == []
