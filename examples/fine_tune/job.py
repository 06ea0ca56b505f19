"""Input and output of a training in either framework."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
SHOWN = 32  # held-out pairs whose logits are compared


@dataclass(frozen=True)
class Job:
    """A training to run.

    Attributes:
        sizes: arguments of transformers' LlamaConfig.
        folder: folder with model.safetensors, train.safetensors and test.safetensors.
        dtype: dtype of parameters and computation: float32 | float64 | bfloat16.
        steps: optimizer steps; None: all steps of all epochs.
        whole: return gradients and parameters instead of the accuracy.
    """

    sizes: dict[str, Any]
    folder: str
    dtype: str
    steps: int | None = None
    whole: bool = False


@dataclass
class Run:
    """Results of a training.

    Attributes:
        losses: loss of each step, the mean over all replicas.
        logits: logits before training, of the first held-out pairs, (SHOWN, C) float64.
        accuracy: accuracy after training, over all held-out pairs.
        gradients: gradients of the first step, by torch's names and in torch's layout.
        parameters: parameters after the last step, by torch's names and in torch's layout.
        unmodified: in float64, the logits of unmodified transformers, which round to float32 internally.
    """

    losses: list[float]
    logits: Any
    accuracy: float = float("nan")
    gradients: Any = field(default_factory=dict)
    parameters: Any = field(default_factory=dict)
    unmodified: Any = None
