"""Soft actor-critic, CleanRL's in PyTorch beside one of pure functions in JAX; see `torch_step`.

    jaxddp check examples/ports/actor_critic/port.py --steps 3

A step has two optimizers, three losses and two target networks; the noise of the actions is in the batch. Torch has
the bounds of the actions as buffers, which need no twin. `--write-names` wrote `names`.
"""

import jax
import numpy as np
import optax
import torch
import torch_actor_critic
from flax_actor_critic import SAC, average, train_step

OBSERVATIONS, ACTIONS, BOUND, BATCH = 17, 6, 1.0, 256  # HalfCheetah
POLICY_LR, Q_LR, GAMMA, TAU, ALPHA = 3e-4, 1e-3, 0.99, 0.005, 0.2
SAC_STEP = SAC(OBSERVATIONS, ACTIONS, BOUND, GAMMA, TAU, ALPHA)
no_twin = ["actor.action_scale", "actor.action_bias"]


def torch_model():
    return torch_actor_critic.make_networks(OBSERVATIONS, ACTIONS, -BOUND, BOUND)


def jax_model():
    return SAC_STEP.init(jax.random.key(0))


def configure_optimizers(networks):
    q_parameters = [*networks["qf1"].parameters(), *networks["qf2"].parameters()]
    actor_parameters = [*networks["actor"].parameters()]
    return {"q": torch.optim.Adam(q_parameters, lr=Q_LR), "actor": torch.optim.Adam(actor_parameters, lr=POLICY_LR)}


jax_optimizer = {"critic": optax.adam(Q_LR), "actor": optax.adam(POLICY_LR)}


def torch_step(networks, optimizers, data):
    return torch_actor_critic.train_step(networks, optimizers, data, GAMMA, TAU, ALPHA)


def jax_step(optimizers, state, batch):
    return train_step(SAC_STEP, optimizers, state, batch, {"critic": average, "actor": average})


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    observations, drift = rng.normal(0, 1, (2, BATCH, OBSERVATIONS))
    actions = rng.uniform(-BOUND, BOUND, (BATCH, ACTIONS))
    return {
        "observations": observations,
        "actions": actions,
        "next_observations": 0.9 * observations + 0.1 * drift,
        "rewards": observations[:, 0] - 0.1 * (actions**2).sum(-1),
        "dones": (rng.random(BATCH) < 0.05).astype(np.float32),
        "noise": rng.normal(0, 1, (BATCH, ACTIONS)),
        "next_noise": rng.normal(0, 1, (BATCH, ACTIONS)),
    }


names = {
    "actor.Dense_0": "actor.fc1",
    "actor.Dense_1": "actor.fc2",
    "actor.Dense_2": "actor.fc_mean",
    "actor.Dense_3": "actor.fc_logstd",
    "target.q1.Dense_0": "qf1_target.fc1",
    "target.q1.Dense_1": "qf1_target.fc2",
    "target.q1.Dense_2": "qf1_target.fc3",
    "target.q2.Dense_0": "qf2_target.fc1",
    "target.q2.Dense_1": "qf2_target.fc2",
    "target.q2.Dense_2": "qf2_target.fc3",
    "critic.q1.Dense_0": "qf1.fc1",
    "critic.q1.Dense_1": "qf1.fc2",
    "critic.q1.Dense_2": "qf1.fc3",
    "critic.q2.Dense_0": "qf2.fc1",
    "critic.q2.Dense_1": "qf2.fc2",
    "critic.q2.Dense_2": "qf2.fc3",
}
