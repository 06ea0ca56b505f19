"""The two language models side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"tokens": rng.integers(0, 11, (8, 6)), "labels": rng.integers(0, 11, (8, 6))}
