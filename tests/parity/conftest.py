"""One pool of torch ranks, and one memory of trajectories, for all parity tests."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from jaxddp.config import TrainConfig
from jaxddp.parity.case import Case, Trajectory
from jaxddp.parity.run_jax import initial_weights, run_jax
from jaxddp.parity.run_torch import TorchPool

MODELS = ("linear", "mlp", "char_mlp", "convnet")
SIZES = {"linear": None, "mlp": (8, 6), "char_mlp": (16,), "convnet": (3, 4)}


def make_case(model: str, optimizer: str = "sgd", world_size: int = 2, steps: int = 20, **options) -> Case:
    """A small case; a momentum, a decay or a rate that is not the default makes a mistake in it show."""
    ignored_labels = options.pop("ignored_labels", 0.0)
    defaults = {
        "dataset": "names" if model == "char_mlp" else "digits",
        "hidden_sizes": SIZES[model],
        "global_batch_size": 32,
        "dtype": "float64",
        "lr": 0.05 if optimizer in ("sgd", "adagrad") else 0.003,
        "weight_decay": 0.02,
    }
    config = TrainConfig(model=model, optimizer=optimizer, **(defaults | options))
    return Case(config, world_size, steps, ignored_labels)


@pytest.fixture(scope="session")
def pool() -> Iterator[TorchPool]:
    with TorchPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def run_both(pool: TorchPool) -> Callable[[Case], tuple[Trajectory, Trajectory]]:
    """A case through jaxddp and torch; asked for twice, it runs once."""

    @cache
    def run(case: Case) -> tuple[Trajectory, Trajectory]:
        weights = initial_weights(case)
        return run_jax(case, weights), pool.run(case, weights)

    return run
