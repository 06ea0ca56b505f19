"""Settings of both frameworks: one step of a small multilayer perceptron on two replicas, in float64."""

import numpy as np
from numpy.typing import NDArray

from jaxddp.config import TrainConfig
from torch_ref.config import TorchConfig

REPLICAS = 2
CONFIG = TorchConfig(
    dataset="linear",
    hidden_sizes=(32, 32),
    dtype="float64",
    log_gradients=("layers.1.*",),
    detect_anomaly=True,
    devices=REPLICAS,
    platform="cpu",
)
LIMIT = 0.01  # largest absolute value of an element of a clipped gradient
POISONED_REPLICA, POISONED = 1, "layers.1.bias"  # replica and parameter whose gradient becomes NaN


def batch(config: TrainConfig = CONFIG) -> dict[str, NDArray]:
    """Draw each replica's examples: "x" (W, B, features), "y" (W, B)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(REPLICAS, 16, config.num_features))
    return {"x": x, "y": rng.integers(config.num_classes, size=(REPLICAS, 16))}
