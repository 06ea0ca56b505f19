"""Deep Q-learning on frames of Atari games, CleanRL's in PyTorch beside one in Flax nnx; see `torch_step`.

    python -m jaxddp.parity examples/ports/value_learning/port.py --steps 3

A step has a target network, an average of the weights, clipped gradients and one optimizer. `--write-names` wrote
`names`.
"""

import flax_value_learning
import numpy as np
import optax
import torch
import torch_value_learning
from flax import nnx

from jaxddp.optim import clip_by_global_norm
from jaxddp.parity import flattened

ACTIONS, BATCH = 6, 32
LR, GAMMA, TAU, EMA_DECAY, MAX_GRAD_NORM = 1e-4, 0.99, 0.005, 0.999, 0.05
torch_clip_grad_norm = MAX_GRAD_NORM  # the optax chain clips


def torch_model():
    return torch_value_learning.make_networks(ACTIONS, EMA_DECAY)


def flax_model():
    return flax_value_learning.Networks(ACTIONS, nnx.Rngs(0))


def configure_optimizers(networks):
    return torch.optim.Adam(networks["q_network"].parameters(), lr=LR)


def flax_optimizer(networks):
    clip = optax.stateless(lambda gradients, _: clip_by_global_norm(gradients, MAX_GRAD_NORM)[0])  # by norm + 1e-6
    return nnx.Optimizer(networks.online, optax.chain(clip, optax.adam(LR)), wrt=nnx.Param)


def torch_step(networks, optimizer, data):
    return torch_value_learning.train_step(networks, optimizer, data, GAMMA, TAU, MAX_GRAD_NORM)


def flax_step(networks, optimizer, data):
    return flax_value_learning.train_step(networks, optimizer, data, GAMMA, TAU, EMA_DECAY)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    y, x = rng.integers(0, 60, (2, BATCH))
    frames = np.full((BATCH, 5, 84, 84), 30, np.uint8)
    for example, time in np.ndindex(BATCH, 5):  # a ball that falls
        frames[example, time, y[example] + 4 * time :, x[example] : x[example] + 8] += 120
    return {
        "observations": frames[:, :4],
        "next_observations": frames[:, 1:],
        "actions": rng.integers(0, ACTIONS, BATCH),
        "rewards": np.sign(y - x).astype(np.float32),
        "dones": (y > 20).astype(np.float32),
    }


names = {
    "target.conv1": "target_network.network.0",
    "target.conv2": "target_network.network.2",
    "target.conv3": "target_network.network.4",
    "target.fc1": flattened("target_network.network.7", (64, 7, 7)),
    "target.fc2": "target_network.network.9",
    "online.conv1": "q_network.network.0",
    "online.conv2": "q_network.network.2",
    "online.conv3": "q_network.network.4",
    "online.fc1": flattened("q_network.network.7", (64, 7, 7)),
    "online.fc2": "q_network.network.9",
    "average.conv1": "ema_network.module.network.0",
    "average.conv2": "ema_network.module.network.2",
    "average.conv3": "ema_network.module.network.4",
    "average.fc1": flattened("ema_network.module.network.7", (64, 7, 7)),
    "average.fc2": "ema_network.module.network.9",
    "averaged": "ema_network.n_averaged",
}
