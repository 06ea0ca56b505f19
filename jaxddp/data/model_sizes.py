"""Sizes of a model, from the configuration and the dataset, for both frameworks."""

import itertools
import math
from typing import Any

from jaxddp.config import TrainConfig
from jaxddp.config.checks import typed
from jaxddp.data.datasets import Dataset
from jaxddp.data.memory import check_memory
from jaxddp.errors import InputError

DEFAULT_HIDDEN_SIZES = {"linear": (), "mlp": (128, 128), "char_mlp": (64,), "convnet": (16, 32)}


def model_sizes(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the constructor arguments of the model that `config` names.

    Raises:
        InputError: a dataset or hidden sizes that the model does not support, or that do not fit into memory.
    """
    hidden = config.hidden_sizes
    if hidden is None:
        hidden = DEFAULT_HIDDEN_SIZES[config.model]
    if config.model in ("linear", "mlp"):
        _check_memory(config, dataset, hidden)
        sizes: dict[str, Any] = {"in_features": math.prod(dataset.input_shape), "num_classes": dataset.num_classes}
        return sizes if config.model == "linear" else {**sizes, "hidden_sizes": hidden, "dropout": config.dropout}
    if config.model == "char_mlp":
        if len(hidden) != 1:
            raise InputError(f"--hidden-sizes {' '.join(map(str, hidden))}: char_mlp has exactly one hidden layer")
        _check_memory(config, dataset, hidden)
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
    _check_memory(config, dataset, hidden)
    return {"in_channels": channels, "channels": hidden, "num_classes": dataset.num_classes, "dropout": config.dropout}


def _check_memory(config: TrainConfig, dataset: Dataset, hidden: tuple[int, ...]) -> None:
    """Raise `InputError` if the weights of the layers, and their gradients, do not fit into memory."""
    flags = [] if config.hidden_sizes is None else [typed("hidden_sizes", hidden)]
    flags += [typed("embedding_size", config.embedding_size)] * (config.model == "char_mlp")
    inputs = math.prod(dataset.input_shape)
    if config.model == "convnet":  # each stage has three 3x3 convolutions
        inputs = (*dataset.input_shape, 1)[2]
        kernels = sum(9 * (into * out + 2 * out * out) for into, out in itertools.pairwise((inputs, *hidden)))
        numbers = kernels + hidden[-1] * dataset.num_classes
    else:
        inputs *= config.embedding_size if config.model == "char_mlp" else 1
        widths = (inputs, *(() if config.model == "linear" else hidden), dataset.num_classes)
        numbers = sum(into * out for into, out in itertools.pairwise(widths))
    where = " ".join([typed("model", config.model), *flags])
    check_memory(f"{where}: {numbers} weights and their gradients", numbers * 8)


def _check_room(input_shape: tuple[int, ...], stages: int) -> None:
    """Raise `InputError` unless a pixel remains after each stage but the first has halved the image."""
    if min(input_shape[:2]) < 2 ** (stages - 1):
        raise InputError(
            f"--hidden-sizes: {stages} stages halve the image {stages - 1} times, too often for "
            f"{input_shape[0]} x {input_shape[1]} pixels"
        )
