"""The two networks side by side."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403

transpose_kernel = ["up"]


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    edges = (rng.random((4, 16, 20)) < 0.3).astype(np.float32)
    return {"image": rng.normal(0.5, 1, (4, 3, 8, 10)), "edges": edges}
