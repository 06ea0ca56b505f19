"""The two policies side by side; noise and time are in the batch."""

import numpy as np
from jax_half import *  # noqa: F403
from torch_half import *  # noqa: F403


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    observations = rng.normal(0.5, 1, (16, 5))
    actions, noise = np.tanh(observations[:, :3]), rng.normal(0, 1, (16, 3))
    return {"observations": observations, "actions": actions, "noise": noise, "time": rng.random((16, 1))}
