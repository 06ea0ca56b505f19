"""The PPO loss in pure functions of a tree with the parameters of two flax.linen networks."""

import jax
import optax
from flax import linen as nn
from jax import numpy as jnp

OBSERVATIONS, ACTIONS, DISCOUNT, TRACE, RANGE = 9, 4, 0.97, 0.9, 0.2


class Network(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(self.outputs)(x)


actor, critic = Network(ACTIONS), Network(1)


def jax_model():
    keys, blank = jax.random.split(jax.random.key(0)), jnp.zeros((1, OBSERVATIONS))
    return {"actor": actor.init(keys[0], blank)["params"], "critic": critic.init(keys[1], blank)["params"]}


def advantages_of(rewards, values, alive):
    """Compute lambda returns less the values, backwards in time, from arrays (T, B)."""
    surprises = rewards + DISCOUNT * alive * values[1:] - values[:-1]

    def back(later, now):
        surprise, alive = now
        advantage = surprise + DISCOUNT * TRACE * alive * later
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(rewards[0]), (surprises, alive), reverse=True)[1]


def jax_loss(params, batch):
    observations, actions = batch["obs"], batch["action"]
    values = critic.apply({"params": params["critic"]}, observations)[..., 0]
    alive = 1 - batch["done"][:, 1:]
    advantages = advantages_of(batch["reward"].T, values.T, alive.T).T
    targets = jax.lax.stop_gradient(advantages + values[:, :-1])
    value_loss = jnp.mean(0.5 * (values[:, :-1] - targets) ** 2)

    advantages = jax.lax.stop_gradient(advantages)
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    log_policy = jax.nn.log_softmax(actor.apply({"params": params["actor"]}, observations[:, :-1]))
    chosen = jnp.take_along_axis(log_policy, actions[..., None], axis=-1).squeeze(-1)
    ratios = jnp.exp(chosen - batch["logprob"])
    gains = ratios * advantages
    bounded = jnp.clip(ratios, 1 - RANGE, 1 + RANGE) * advantages
    policy_gain = jnp.minimum(gains, bounded).mean()
    entropy = -(jnp.exp(log_policy) * log_policy).sum(axis=-1).mean()
    return 0.5 * value_loss - policy_gain - 0.02 * entropy


jax_optimizer = optax.multi_transform(
    {
        "actor": optax.adam(3e-4, eps=1e-5),
        "critic": optax.adam(1e-3, eps=1e-5),
    },
    {"actor": "actor", "critic": "critic"},
)

names = {
    "actor.Dense_0": "actor.0",
    "actor.Dense_1": "actor.2",
    "actor.Dense_2": "actor.4",
    "critic.Dense_0": "critic.0",
    "critic.Dense_1": "critic.2",
    "critic.Dense_2": "critic.4",
}
