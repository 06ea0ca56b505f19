"""The two updates side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    inputs = rng.normal(0.5, 1, (16, 6))
    return {"inputs": inputs, "targets": np.sin(inputs.sum(-1))}


names = {
    "one.Dense_0": "one.0",
    "one.Dense_1": "one.2",
    "two.Dense_0": "two.0",
    "two.Dense_1": "two.2",
}
