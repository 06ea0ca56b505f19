"""Proximal policy optimization of an actor and a critic, after CleanRL, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

OBSERVATIONS, ACTIONS, HIDDEN, ENVS, STEPS = 9, 4, 32, 4, 6
GAMMA, GAE_LAMBDA, CLIP_COEF, ENT_COEF, VF_COEF = 0.97, 0.9, 0.2, 0.02, 0.5


def mlp(outputs):
    return nn.Sequential(
        nn.Linear(OBSERVATIONS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
    )


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(ACTIONS), mlp(1)

    def forward(self, obs, action):
        dist = Categorical(logits=self.actor(obs[:, :-1]))
        return dist.log_prob(action), dist.entropy(), self.critic(obs).squeeze(-1)


def torch_model():
    return Agent()


def estimate(rewards, values, dones):
    """Compute generalized advantages; dones[:, t] says that observation t begins an episode."""
    advantages = torch.zeros_like(rewards)
    lastgaelam = 0
    for t in reversed(range(STEPS)):
        nextnonterminal = 1.0 - dones[:, t + 1]
        delta = rewards[:, t] + GAMMA * values[:, t + 1] * nextnonterminal - values[:, t]
        advantages[:, t] = lastgaelam = delta + GAMMA * GAE_LAMBDA * nextnonterminal * lastgaelam
    return advantages


def torch_loss(model, batch):
    newlogprob, entropy, values = model(batch["obs"], batch["action"])
    with torch.no_grad():
        advantages = estimate(batch["reward"], values, batch["done"])
        returns = advantages + values[:, :-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    logratio = newlogprob - batch["logprob"]
    ratio = logratio.exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - CLIP_COEF, 1 + CLIP_COEF)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    v_loss = 0.5 * ((values[:, :-1] - returns) ** 2).mean()
    entropy_loss = entropy.mean()
    return pg_loss - ENT_COEF * entropy_loss + VF_COEF * v_loss


def configure_optimizers(model):
    groups = [{"params": model.actor.parameters(), "lr": 3e-4}, {"params": model.critic.parameters(), "lr": 1e-3}]
    return torch.optim.Adam(groups, eps=1e-5)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 11))
    obs = rng.normal(0, 1, (ENVS, STEPS + 1, OBSERVATIONS))
    return {
        "obs": obs,
        "action": rng.integers(0, ACTIONS, (ENVS, STEPS)),
        "logprob": rng.normal(-1.4, 0.2, (ENVS, STEPS)),
        "reward": np.tanh(obs[:, 1:, 0]) + rng.normal(0, 0.5, (ENVS, STEPS)),
        "done": (rng.random((ENVS, STEPS + 1)) < 0.25).astype(np.float32),
    }
