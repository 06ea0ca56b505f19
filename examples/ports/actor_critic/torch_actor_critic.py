"""Soft actor-critic in PyTorch, written like CleanRL's sac_continuous_action.py: https://arxiv.org/abs/1801.01290."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOG_STD_MAX, LOG_STD_MIN = 2, -5


class SoftQNetwork(nn.Module):
    """Observations and actions to their values (B, 1)."""

    def __init__(self, observations: int, actions: int):
        super().__init__()
        self.fc1 = nn.Linear(observations + actions, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        x = torch.cat([x, a], 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Actor(nn.Module):
    """Observations to the mean and the log of the standard deviation of the actions before tanh, (B, actions)."""

    action_scale: Tensor
    action_bias: Tensor

    def __init__(self, observations: int, actions: int, low: float, high: float):
        super().__init__()
        self.fc1 = nn.Linear(observations, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean = nn.Linear(256, actions)
        self.fc_logstd = nn.Linear(256, actions)
        self.register_buffer("action_scale", torch.full((actions,), (high - low) / 2.0))
        self.register_buffer("action_bias", torch.full((actions,), (high + low) / 2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        mean = self.fc_mean(x)
        log_std = torch.tanh(self.fc_logstd(x))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)  # From SpinUp / Denis Yarats
        return mean, log_std

    def get_action(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (B, actions) and the logs of their densities (B, 1); the noise is standard normal."""
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = mean + log_std.exp() * noise
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t)
        log_prob -= torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return action, log_prob.sum(1, keepdim=True)


def make_networks(observations: int, actions: int, low: float, high: float) -> nn.ModuleDict:
    networks: dict[str, nn.Module] = {"actor": Actor(observations, actions, low, high)}
    networks |= {name: SoftQNetwork(observations, actions) for name in ("qf1", "qf2", "qf1_target", "qf2_target")}
    networks["qf1_target"].load_state_dict(networks["qf1"].state_dict())
    networks["qf2_target"].load_state_dict(networks["qf2"].state_dict())
    return nn.ModuleDict(networks)


def train_step(
    networks: Any,
    optimizers: Mapping[str, torch.optim.Optimizer],
    data: Mapping[str, Tensor],
    gamma: float,
    tau: float,
    alpha: float,
) -> dict[str, Tensor]:
    actor, qf1, qf2 = networks["actor"], networks["qf1"], networks["qf2"]
    q_optimizer, actor_optimizer = optimizers["q"], optimizers["actor"]

    with torch.no_grad():
        next_state_actions, next_state_log_pi = actor.get_action(data["next_observations"], data["next_noise"])
        qf1_next_target = networks["qf1_target"](data["next_observations"], next_state_actions)
        qf2_next_target = networks["qf2_target"](data["next_observations"], next_state_actions)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target) - alpha * next_state_log_pi
        next_q_value = data["rewards"] + (1 - data["dones"]) * gamma * min_qf_next_target.view(-1)

    qf1_a_values = qf1(data["observations"], data["actions"]).view(-1)
    qf2_a_values = qf2(data["observations"], data["actions"]).view(-1)
    qf1_loss = F.mse_loss(qf1_a_values, next_q_value)
    qf2_loss = F.mse_loss(qf2_a_values, next_q_value)
    qf_loss = qf1_loss + qf2_loss

    q_optimizer.zero_grad()
    qf_loss.backward()
    q_optimizer.step()

    for parameter in [*qf1.parameters(), *qf2.parameters()]:  # as in SpinUp, which spares their gradients
        parameter.requires_grad = False
    pi, log_pi = actor.get_action(data["observations"], data["noise"])
    qf1_pi = qf1(data["observations"], pi)
    qf2_pi = qf2(data["observations"], pi)
    min_qf_pi = torch.min(qf1_pi, qf2_pi)
    actor_loss = ((alpha * log_pi) - min_qf_pi).mean()

    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    for parameter in [*qf1.parameters(), *qf2.parameters()]:
        parameter.requires_grad = True

    for param, target_param in zip(qf1.parameters(), networks["qf1_target"].parameters(), strict=True):
        target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)
    for param, target_param in zip(qf2.parameters(), networks["qf2_target"].parameters(), strict=True):
        target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)
    return {"qf1": qf1_loss, "qf2": qf2_loss, "actor": actor_loss}
