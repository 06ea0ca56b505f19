"""The two convolutions side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    x, y = rng.normal(0.5, 1, (2, 4, 9, 6))
    return {"x": x, "y": y}
