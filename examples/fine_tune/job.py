"""What both sides are told, and what they tell; it knows neither framework."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
SHOWN = 32  # held-out pairs whose logits are compared


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        sizes: the model's, as transformers' LlamaConfig takes them.
        folder: holds model.safetensors, train.safetensors and test.safetensors.
        dtype: of parameters and computation: float32 | float64 | bfloat16.
        steps: optimizer steps; None: all of all epochs.
        whole: whether gradients and parameters are wanted, and not the accuracy.
    """

    sizes: dict[str, Any]
    folder: str
    dtype: str
    steps: int | None = None
    whole: bool = False


@dataclass
class Run:
    """What has come of it.

    Attributes:
        losses: of each step, the mean over all replicas.
        logits: before training, of the first held-out pairs, (SHOWN, C) float64.
        accuracy: after training, over all held-out pairs.
        gradients: of the first step, by torch's names and in its layout.
        parameters: after the last step, likewise.
        as_it_comes: in float64, `logits` as transformers has them, which rounds to float32 on the way.
    """

    losses: list[float]
    logits: Any
    accuracy: float = float("nan")
    gradients: Any = field(default_factory=dict)
    parameters: Any = field(default_factory=dict)
    as_it_comes: Any = None
