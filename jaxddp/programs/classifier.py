"""The program of `jaxddp train` without a file: a classifier of digits, of names, or of arrays of the user's.

A program as a user writes one; each function imports its framework, since either trainer runs without the other's.
"""

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxddp.config import TrainConfig
from jaxddp.config.options import BuiltInOptions as Options
from jaxddp.data import datasets

__all__ = ["Options"]


def title(options: Options) -> str:
    """Return the first part of a run's title."""
    return f"{options.model} on {datasets.place(options)}"


def _dataset(config: TrainConfig) -> datasets.Dataset:
    stamp = 0
    if config.data_path is not None:
        with contextlib.suppress(OSError, ValueError):  # reported when it is read
            stamp = hash(Path(config.data_path).stat())
    return _load(config, stamp)


@lru_cache(maxsize=1)
def _load(config: TrainConfig, stamp: int) -> datasets.Dataset:
    """Load a dataset once for the functions below, as long as its file stays as it was."""
    return datasets.load(config)


def train_data(config: Any) -> dict[str, Any]:
    """Return the training examples: "x" (N, ...) and labels "y" (N,)."""
    return _dataset(config).train


def test_data(config: Any) -> dict[str, Any]:
    """Return the test examples, likewise."""
    return _dataset(config).test


def jax_model(config: Any) -> Any:
    """Return the flax.nnx module that `--model` names, sized for the data."""
    from jaxddp import models

    return models.build(config, _dataset(config))


def jax_loss(model: Any, batch: Any, options: Options, train: bool) -> Any:
    """Return the cross entropy and the accuracy, per example."""
    from jaxddp.nn.losses import cross_entropy

    return cross_entropy(model, batch, options.label_smoothing if train else 0.0)


def torch_model(config: Any) -> Any:
    """Return its twin."""
    from torch_ref import models

    return models.build(config, _dataset(config))


def torch_loss(model: Any, batch: Any, options: Options, config: Any, train: bool) -> Any:
    """Return the cross entropy and the accuracy, summed over the examples."""
    from torch_ref.losses import cross_entropy

    return cross_entropy(model, batch, options.label_smoothing if train else 0.0, config.detect_anomaly and train)
