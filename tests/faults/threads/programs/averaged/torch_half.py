"""A step of a network whose weights are averaged, in PyTorch."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

LR, DECAY = 1e-3, 0.999


def torch_model():
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    return nn.ModuleDict({"network": network, "average": copy.deepcopy(network).requires_grad_(False)})


def configure_optimizers(model):
    return torch.optim.Adam(model["network"].parameters(), lr=LR)


def torch_step(model, optimizer, batch):
    loss = F.mse_loss(model["network"](batch["x"])[:, 0], batch["y"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(model["average"].parameters(), model["network"].parameters(), strict=True):
            average.lerp_(weight, 1 - DECAY)
    return loss
