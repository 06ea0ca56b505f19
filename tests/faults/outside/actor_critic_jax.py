"""Proximal policy optimization in Equinox: a Gaussian policy squashed by tanh, GAE, a clipped objective."""

import equinox as eqx
import jax
import optax
from jax import numpy as jnp
from jax.scipy.stats import norm

OBSERVATIONS, ACTIONS, WIDTH = 4, 2, 8


class ActorCritic(eqx.Module):
    torso: eqx.nn.Linear
    policy: eqx.nn.Linear
    value: eqx.nn.Linear
    log_std: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.torso = eqx.nn.Linear(OBSERVATIONS, WIDTH, key=keys[0])
        self.policy = eqx.nn.Linear(WIDTH, ACTIONS, key=keys[1])
        self.value = eqx.nn.Linear(WIDTH, 1, key=keys[2])
        self.log_std = jnp.full(ACTIONS, -0.5)

    def __call__(self, observation):
        h = jnp.tanh(self.torso(observation))
        return self.policy(h), self.value(h)[0]


def jax_model():
    return ActorCritic(jax.random.key(0))


def log_density(mean, log_std, action):
    """Return the log of the density of tanh(u), u normal."""
    u = jnp.arctanh(action)
    return (norm.logpdf(u, mean, jnp.exp(log_std)) - jnp.log(1 - jnp.square(action) + 1e-6)).sum(axis=-1)


def advantages_of(rewards, values, dones):
    """Generalized advantage estimation over (B, T); values have one more step."""
    going_on = 1 - dones
    deltas = rewards + 0.99 * going_on * values[:, 1:] - values[:, :-1]

    def step(carried, now):
        delta, goes_on = now
        carried = delta + 0.99 * 0.9 * goes_on * carried
        return carried, carried

    start = jnp.zeros_like(deltas[:, 0])
    return jax.lax.scan(step, start, (deltas.T, going_on.T), reverse=True)[1].T


def jax_loss(model, batch):
    means, values = jax.vmap(jax.vmap(model))(batch["observations"])
    advantages = jax.lax.stop_gradient(advantages_of(batch["rewards"], values, batch["dones"]))
    returns = jax.lax.stop_gradient(advantages + values[:, :-1])
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    ratio = jnp.exp(log_density(means[:, :-1], model.log_std, batch["actions"]) - batch["log_density"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = optax.huber_loss(values[:, :-1], returns, delta=0.2).mean() / 0.2
    entropy = (0.5 * jnp.log(2 * jnp.pi * jnp.e) + model.log_std).sum()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


jax_optimizer = optax.adam(3e-3, eps=1e-5)
