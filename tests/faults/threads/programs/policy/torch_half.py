"""Loss of a soft actor in PyTorch: a squashed normal, reparameterised, against a fixed critic."""

import math

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(5, 16)
        self.mean = nn.Linear(16, 2)
        self.log_std = nn.Linear(16, 2)

    def forward(self, observations):
        x = torch.relu(self.hidden(observations))
        return self.mean(x), torch.tanh(self.log_std(x))


def torch_model():
    return Actor()


def torch_loss(model, batch):
    mean, log_std = model(batch["observations"])
    raw = mean + log_std.exp() * batch["noise"]
    action = torch.tanh(raw)
    density = -0.5 * ((raw - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    density = (density - torch.log(1 - action**2 + 1e-6)).sum(-1)
    value = (action * batch["observations"][:, :2]).sum(-1)
    return (0.2 * density - value).mean()


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=3e-4)
