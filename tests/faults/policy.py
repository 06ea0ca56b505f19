"""An actor and critic with PPO's clipped losses, in torch and in jax.

The jax half has an argument for each choice that can be wrong; the defaults are correct.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from jax import numpy as jnp
from torch import Tensor, nn

from tests.support.layers import Linear

OBSERVED, UNITS, ACTIONS = 7, 9, 4
CLIP, VALUES, ENTROPY = 0.2, 0.5, 0.01  # half the width of the clipping; weights of two terms
FARTHEST = 1.2  # standardised observations are clamped to -FARTHEST .. FARTHEST
SMALL = 1e-5


def examples(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Return steps of an older policy, far enough from the new one that some are clipped."""
    return {
        "x": rng.normal(3.0, 1.0, (size, OBSERVED)),
        "action": rng.integers(0, ACTIONS, size),
        "log_probability": rng.normal(-np.log(ACTIONS), 0.3, size),
        "advantage": rng.normal(0.5, 1.0, size),
        "value": rng.normal(0.0, 0.5, size),
        "return": rng.normal(1.0, 1.0, size),
    }


class TorchPolicy(nn.Module):
    """Layers fc, actor and critic on observations that are standardised and clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(OBSERVED, UNITS)
        self.actor = nn.Linear(UNITS, ACTIONS)
        self.critic = nn.Linear(UNITS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        x = ((x - mean) / torch.sqrt(variance + SMALL)).clamp(-FARTHEST, FARTHEST)
        hidden = torch.tanh(self.fc(x))
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def torch_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean of the clipped policy loss, of the clipped value loss, and of the entropy."""
    log_p, values = model(batch["x"])
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    taken = log_p.gather(-1, batch["action"][:, None]).squeeze(-1)
    ratio = torch.exp(taken - batch["log_probability"])
    policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
    clipped = batch["value"] + torch.clamp(values - batch["value"], -CLIP, CLIP)
    value = torch.maximum((values - batch["return"]) ** 2, (clipped - batch["return"]) ** 2).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return policy + VALUES * value - ENTROPY * entropy


def near(x: jax.Array) -> jax.Array:
    """Clamp standardised observations."""
    return jnp.clip(x, -FARTHEST, FARTHEST)


class FlaxPolicy(nnx.Module):
    """Twin of `TorchPolicy`.

    Args:
        ddof: number by which the divisor of the observations' variance is less than their number.
        clamp: standardised observations -> clamped ones.
    """

    def __init__(self, ddof: int = 0, clamp: Callable[[jax.Array], jax.Array] = near):
        rngs = nnx.Rngs(0)
        self.fc = Linear(OBSERVED, UNITS, rngs=rngs)
        self.actor = Linear(UNITS, ACTIONS, rngs=rngs)
        self.critic = Linear(UNITS, 1, rngs=rngs)
        self.ddof, self.clamp = ddof, clamp

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        variance = x.var(-1, keepdims=True, ddof=self.ddof)
        hidden = jnp.tanh(self.fc(self.clamp((x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance + SMALL))))
        return jax.nn.log_softmax(self.actor(hidden)), self.critic(hidden)[..., 0]


def jax_loss(
    model: Any,
    batch: Mapping[str, jax.Array],
    ddof: int = 1,
    of_policy: Callable[[jax.Array, jax.Array], jax.Array] = jnp.maximum,
    of_values: Callable[[jax.Array, jax.Array], jax.Array] = jnp.maximum,
    widths: tuple[float, float] = (CLIP, CLIP),
) -> jax.Array:
    """Compute `torch_loss`.

    Args:
        model, batch: as in `torch_loss`.
        ddof: number by which the divisor of the advantages' variance is less than their number.
        of_policy, of_values: (unclipped, clipped) terms of the policy loss and the value loss -> terms that count.
        widths: by which the ratio may be less and more than 1.
    """
    log_p, values = model(batch["x"])
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=ddof) + 1e-8)
    taken = jnp.take_along_axis(log_p, batch["action"][:, None], -1)[:, 0]
    ratio = jnp.exp(taken - batch["log_probability"])
    policy = of_policy(-advantage * ratio, -advantage * jnp.clip(ratio, 1 - widths[0], 1 + widths[1])).mean()
    clipped = batch["value"] + jnp.clip(values - batch["value"], -CLIP, CLIP)
    value = of_values((values - batch["return"]) ** 2, (clipped - batch["return"]) ** 2).mean()
    entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
    return policy + VALUES * value - ENTROPY * entropy
