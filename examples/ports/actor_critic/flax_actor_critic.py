"""Soft actor-critic in pure functions: Linen modules, trees of their parameters, and optax by hand."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp
from jax.scipy.stats import norm

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
Params = Any
Apply = Callable[..., Any]


class Critic(nn.Module):
    @nn.compact
    def __call__(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        x = jnp.concatenate([observations, actions], axis=-1)
        x = nn.relu(nn.Dense(256)(x))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(1)(x).squeeze(-1)


class Actor(nn.Module):
    actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Dense(256)(observations))
        x = nn.relu(nn.Dense(256)(x))
        mean, log_std = nn.Dense(self.actions)(x), jnp.tanh(nn.Dense(self.actions)(x))
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)


@dataclasses.dataclass(frozen=True)
class SAC:
    """Hold the networks, whose actions are in [-bound, bound], and constants of the algorithm."""

    observations: int
    actions: int
    bound: float
    gamma: float
    tau: float
    alpha: float

    def init(self, key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        observations, actions = jnp.zeros((1, self.observations)), jnp.zeros((1, self.actions))
        critics = {f"q{i}": Critic().init(keys[i], observations, actions)["params"] for i in (1, 2)}
        actor = Actor(self.actions).init(keys[0], observations)["params"]
        return {"actor": actor, "critic": critics, "target": critics}

    def values(self, critics: Params, observations: jax.Array, actions: jax.Array) -> jax.Array:
        """Return the two values of each action, (2, B)."""
        apply: Apply = Critic().apply
        return jnp.stack([apply({"params": params}, observations, actions) for params in critics.values()])

    def sample(self, params: Params, observations: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return actions and the logs of their densities."""
        apply: Apply = Actor(self.actions).apply
        mean, log_std = apply({"params": params}, observations)
        before_tanh = mean + jnp.exp(log_std) * noise
        squashed = jnp.tanh(before_tanh)
        log_density = norm.logpdf(before_tanh, mean, jnp.exp(log_std))
        log_density -= jnp.log(self.bound * (1 - squashed**2) + 1e-6)
        return self.bound * squashed, log_density.sum(-1)

    def critic_loss(self, critics: Params, params: Params, batch: Mapping[str, jax.Array]) -> Any:
        next_actions, log_density = self.sample(params["actor"], batch["next_observations"], batch["next_noise"])
        next_values = self.values(params["target"], batch["next_observations"], next_actions).min(0)
        next_values -= self.alpha * log_density
        targets = batch["rewards"] + self.gamma * (1 - batch["dones"]) * next_values
        losses = ((self.values(critics, batch["observations"], batch["actions"]) - targets) ** 2).mean(-1)
        return losses.sum(), {"qf1": losses[0], "qf2": losses[1]}

    def actor_loss(self, actor: Params, params: Params, batch: Mapping[str, jax.Array]) -> Any:
        actions, log_density = self.sample(actor, batch["observations"], batch["noise"])
        values = self.values(params["critic"], batch["observations"], actions).min(0)
        loss = (self.alpha * log_density - values).mean()
        return loss, {"actor": loss}


def average(gradients: Params) -> Params:
    """Average over the replicas."""
    return jax.lax.pmean(gradients, "replica")


def train_step(
    sac: SAC,
    optimizers: Mapping[str, optax.GradientTransformation],
    state: Any,
    batch: Mapping[str, jax.Array],
    reduce: Mapping[str, Callable[[Params], Params]],
) -> tuple[Any, dict[str, jax.Array]]:
    """Update the critics, the actor and the target networks; `reduce` combines the replicas' gradients."""
    params, opt_state = dict(state.params), dict(state.opt_state)
    losses: dict[str, jax.Array] = {}
    for name, loss_fn in {"critic": sac.critic_loss, "actor": sac.actor_loss}.items():
        gradients, of_one = jax.grad(loss_fn, has_aux=True)(params[name], params, batch)
        updates, opt_state[name] = optimizers[name].update(reduce[name](gradients), opt_state[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
        losses |= of_one
    params["target"] = optax.incremental_update(params["critic"], params["target"], sac.tau)
    return dataclasses.replace(state, params=params, opt_state=opt_state), losses
