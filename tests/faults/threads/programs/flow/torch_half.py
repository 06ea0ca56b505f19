"""A policy that learns a flow from noise to actions, in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

LR = 2.5e-5


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, 24)
        self.second = nn.Linear(24, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.last(F.silu(self.second(x)))


def torch_model():
    return Flow()


def torch_loss(model, batch):
    time, noise, actions = batch["time"], batch["noise"], batch["actions"]
    between = time * noise + (1 - time) * actions
    velocity = model(torch.cat([batch["observations"], between, time], -1))
    return F.mse_loss(velocity, noise - actions)


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=1e-10)
