"""Deep Q-learning in PyTorch, written like CleanRL's dqn_atari.py, with the loss of https://doi.org/10.1038/nature14236.

Beside the target network stands an average of the online network's weights, which is evaluated.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class QNetwork(nn.Module):
    """Frames (B, 4, 84, 84) of uint8 to the values (B, actions) of the actions."""

    def __init__(self, actions: int):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, actions),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x / 255.0)


def make_networks(actions: int, ema_decay: float) -> nn.ModuleDict:
    q_network = QNetwork(actions)
    target_network = QNetwork(actions).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    ema_network = AveragedModel(q_network, multi_avg_fn=get_ema_multi_avg_fn(ema_decay)).requires_grad_(False)
    return nn.ModuleDict({"q_network": q_network, "target_network": target_network, "ema_network": ema_network})


def train_step(
    networks: Any,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Tensor],
    gamma: float,
    tau: float,
    max_grad_norm: float,
) -> Tensor:
    q_network, target_network = networks["q_network"], networks["target_network"]
    with torch.no_grad():
        target_max, _ = target_network(data["next_observations"]).max(dim=1)
        td_target = data["rewards"] + gamma * target_max * (1 - data["dones"])
    old_val = q_network(data["observations"]).gather(1, data["actions"].unsqueeze(1)).squeeze(1)
    loss = F.smooth_l1_loss(old_val, td_target)

    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q_network.parameters(), max_grad_norm)
    optimizer.step()

    for target_param, param in zip(target_network.parameters(), q_network.parameters(), strict=True):
        target_param.data.copy_(tau * param.data + (1.0 - tau) * target_param.data)
    networks["ema_network"].update_parameters(q_network)
    return loss
