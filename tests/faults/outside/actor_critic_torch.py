"""Proximal policy optimization in PyTorch: a Gaussian policy squashed by tanh, GAE, a clipped objective."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

OBSERVATIONS, ACTIONS, WIDTH, LENGTH = 4, 2, 8, 5


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso = nn.Linear(OBSERVATIONS, WIDTH)
        self.policy = nn.Linear(WIDTH, ACTIONS)
        self.value = nn.Linear(WIDTH, 1)
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.5))

    def forward(self, observations):
        h = torch.tanh(self.torso(observations))
        return self.policy(h), self.value(h).squeeze(-1)


def torch_model():
    return ActorCritic()


def log_density(mean, log_std, action):
    """Return the log of the density of tanh(u), u normal."""
    u = torch.atanh(action)
    normal = torch.distributions.Normal(mean, log_std.exp())
    return (normal.log_prob(u) - torch.log(1 - action.pow(2) + 1e-6)).sum(dim=-1)


def advantages_of(rewards, values, dones):
    """Generalized advantage estimation over (B, T); values have one more step."""
    advantages, carried = [], torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        going_on = 1 - dones[:, t]
        delta = rewards[:, t] + 0.99 * going_on * values[:, t + 1] - values[:, t]
        carried = delta + 0.99 * 0.9 * going_on * carried
        advantages.insert(0, carried)
    return torch.stack(advantages, dim=1)


def torch_loss(model, batch):
    means, values = model(batch["observations"])
    with torch.no_grad():
        advantages = advantages_of(batch["rewards"], values, batch["dones"])
        returns = advantages + values[:, :-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.exp(log_density(means[:, :-1], model.log_std, batch["actions"]) - batch["log_density"])
    clipped = torch.clamp(ratio, 0.8, 1.2)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    value_loss = F.smooth_l1_loss(values[:, :-1], returns, beta=0.2)
    entropy = torch.distributions.Normal(means, model.log_std.exp()).entropy().sum(dim=-1).mean()
    return policy_loss + 0.5 * value_loss - 0.01 * entropy


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=3e-3, eps=1e-5)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    actions = np.tanh(0.6 * rng.normal(0, 1, (6, LENGTH, ACTIONS)))
    return {
        "observations": rng.normal(0, 1, (6, LENGTH + 1, OBSERVATIONS)),
        "actions": actions,
        "log_density": rng.normal(-1, 0.5, (6, LENGTH)),
        "rewards": rng.normal(0, 1, (6, LENGTH)),
        "dones": (rng.random((6, LENGTH)) < 0.25).astype(float),
    }
