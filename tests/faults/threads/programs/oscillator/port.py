"""The two networks side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    t = np.random.default_rng((step, rank)).random((16, 1))
    return {"t": t, "u": np.exp(-2 * t) * np.cos(20 * t)}
