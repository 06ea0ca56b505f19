"""The two autoencoders side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(0.5, 1, (16, 8)), "chosen": rng.integers(0, 16, 16)}
