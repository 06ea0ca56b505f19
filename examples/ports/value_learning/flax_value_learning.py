"""Deep Q-learning in Flax nnx: frames as in Atari wrappers, (B, 4, 84, 84), and channels last in the network."""

from collections.abc import Mapping

import jax
import optax
from flax import nnx
from jax import numpy as jnp


class QNetwork(nnx.Module):
    """Frames (B, 4, 84, 84) of uint8 to the values (B, actions) of the actions."""

    def __init__(self, actions: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(4, 32, (8, 8), strides=4, padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (4, 4), strides=2, padding="VALID", rngs=rngs)
        self.conv3 = nnx.Conv(64, 64, (3, 3), strides=1, padding="VALID", rngs=rngs)
        self.fc1 = nnx.Linear(3136, 512, rngs=rngs)
        self.fc2 = nnx.Linear(512, actions, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 1, -1) / 255.0
        for conv in (self.conv1, self.conv2, self.conv3):
            x = nnx.relu(conv(x))
        x = nnx.relu(self.fc1(x.reshape(x.shape[0], -1)))
        return self.fc2(x)


class Networks(nnx.Module):
    """The network that learns, its slow copy that gives the targets, and the average of its weights."""

    def __init__(self, actions: int, rngs: nnx.Rngs):
        self.online = QNetwork(actions, rngs)
        self.target = nnx.clone(self.online)
        self.average = nnx.clone(self.online)
        self.averaged = nnx.Variable(jnp.zeros((), jnp.int32))


def move(network: nnx.Module, towards: nnx.Module, step_size: float | jax.Array) -> None:
    """Move the weights of a network towards those of another."""
    nnx.update(network, optax.incremental_update(nnx.state(towards), nnx.state(network), step_size))


def train_step(
    networks: Networks,
    optimizer: nnx.Optimizer,
    batch: Mapping[str, jax.Array],
    gamma: float,
    tau: float,
    ema_decay: float,
) -> jax.Array:
    next_values = networks.target(batch["next_observations"]).max(axis=1)
    targets = batch["rewards"] + gamma * next_values * (1 - batch["dones"])

    def loss_fn(online: QNetwork) -> jax.Array:
        values = jnp.take_along_axis(online(batch["observations"]), batch["actions"][:, None], axis=1)[:, 0]
        return optax.huber_loss(values, targets).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(networks.online)
    optimizer.update(networks.online, jax.lax.pmean(gradients, "replica"))
    move(networks.target, networks.online, tau)
    # AveragedModel copies the weights at its first update.
    move(networks.average, networks.online, jnp.where(networks.averaged[...] == 0, 1.0, 1 - ema_decay))
    networks.averaged[...] += 1
    return loss
