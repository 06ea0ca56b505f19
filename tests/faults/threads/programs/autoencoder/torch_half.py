"""A linear autoencoder in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

LR = 1e-3


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 3)
        self.decode = nn.Linear(3, 8)

    def forward(self, x):
        return self.decode(self.encode(x))


def torch_model():
    return Autoencoder()


def torch_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["x"])


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=LR)
