"""The two ResNets side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"image": rng.normal(0.5, 1, (8, 3, 10, 12)), "label": rng.integers(0, 4, 8)}
