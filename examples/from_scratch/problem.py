"""Task of both frameworks: two replicas train a small classifier on a linear problem."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxddp.data import datasets
from jaxddp.data.sampler import epoch_indices
from torch_ref.config import TorchConfig

Batch = Mapping[str, np.ndarray]

STEPS = 20
MICRO_BATCH = 8  # examples per replica
ACCUMULATION = 4  # micro-batches per optimizer step

# Differences of parameters, relative to the largest.
ROUNDING = 1e-12  # float64 [measured: 3e-16]
PLAIN = 1e-3  # far above rounding [measured: 0.08]

CONFIG = TorchConfig(
    model="mlp",
    hidden_sizes=(32,),
    dataset="linear",
    num_examples=2 * MICRO_BATCH * STEPS,
    optimizer="sgd",
    lr=0.1,
    momentum=0.9,
    dtype="float64",
    devices=2,
    platform="cpu",
)

# Large enough that the work in a step exceeds the overhead of its calls.
TIMED_STEPS = 10
TIMED_BATCH = 128
TIMED = replace(
    CONFIG, hidden_sizes=(256, 256), num_features=64, num_examples=2 * TIMED_BATCH * TIMED_STEPS, dtype="float32"
)


def batches(config: TorchConfig = CONFIG, steps: int = STEPS) -> list[Batch]:
    """Split an epoch into `steps` batches of x (2, B, features) and y (2, B); slice r belongs to replica r."""
    data = datasets.load(config).astype(config.dtype).train
    indices = epoch_indices(len(data["y"]), num_replicas=2, seed=config.seed)
    return [{name: array[part] for name, array in data.items()} for part in np.split(indices, steps, axis=1)]


def joined(micro_batches: Sequence[Batch], size: int = ACCUMULATION) -> list[Batch]:
    """Join every `size` micro-batches (2, B, ...) into one batch of the same examples, (2, size B, ...)."""
    groups = [micro_batches[start : start + size] for start in range(0, len(micro_batches), size)]
    return [{name: np.concatenate([batch[name] for batch in group], axis=1) for name in group[0]} for group in groups]


def contiguous_steps(num_examples: int, world_size: int, batch_size: int) -> list[int]:
    """Count the full batches of each rank if rank r takes the r-th piece of the data, the last rank also the rest.

    >>> contiguous_steps(31, world_size=2, batch_size=4)
    [3, 4]
    """
    piece = num_examples // world_size
    sizes = [piece] * (world_size - 1) + [num_examples - piece * (world_size - 1)]
    return [size // batch_size for size in sizes]
