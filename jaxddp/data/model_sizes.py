"""Sizes of a model, from the configuration and the dataset, for both frameworks."""

import math
from typing import Any

from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset
from jaxddp.errors import InputError

DEFAULT_HIDDEN_SIZES = {"linear": (), "mlp": (128, 128), "char_mlp": (64,), "convnet": (16, 32)}


def model_sizes(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the constructor arguments of the model that `config` names.

    Raises:
        InputError: a dataset or hidden sizes that the model does not support.
    """
    hidden = config.hidden_sizes
    if hidden is None:
        hidden = DEFAULT_HIDDEN_SIZES[config.model]
    if config.model in ("linear", "mlp"):
        sizes: dict[str, Any] = {"in_features": math.prod(dataset.input_shape), "num_classes": dataset.num_classes}
        return sizes if config.model == "linear" else {**sizes, "hidden_sizes": hidden, "dropout": config.dropout}
    if config.model == "char_mlp":
        if len(hidden) != 1:
            raise InputError(f"--hidden-sizes {' '.join(map(str, hidden))}: char_mlp has exactly one hidden layer")
        return {
            "vocab_size": dataset.num_classes,
            "context_length": config.context_length,
            "embedding_size": config.embedding_size,
            "hidden_size": hidden[0],
            "dropout": config.dropout,
        }
    if len(dataset.input_shape) not in (2, 3):
        raise InputError(
            f"--model convnet: needs images (H, W) or (H, W, C), but --dataset {dataset.name} has "
            f"inputs of shape {dataset.input_shape}"
        )
    if not hidden:
        raise InputError("--hidden-sizes: convnet needs at least one stage of channels")
    channels = dataset.input_shape[2] if len(dataset.input_shape) == 3 else 1
    _check_room(dataset.input_shape, stages=len(hidden))
    return {
        "in_channels": channels,
        "channels": hidden,
        "num_classes": dataset.num_classes,
        "dropout": config.dropout,
    }


def _check_room(input_shape: tuple[int, ...], stages: int) -> None:
    """Raise `InputError` unless a pixel remains after each stage but the first has halved the image."""
    if min(input_shape[:2]) < 2 ** (stages - 1):
        raise InputError(
            f"--hidden-sizes: {stages} stages halve the image {stages - 1} times, too often for "
            f"{input_shape[0]} x {input_shape[1]} pixels"
        )
