"""Update of two critics with an optimizer each, in PyTorch."""

import torch
from torch import nn
from torch.nn import functional as F

LR = 1e-3


def critic():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))


def torch_model():
    return nn.ModuleDict({"one": critic(), "two": critic()})


def configure_optimizers(model):
    return {name: torch.optim.Adam(model[name].parameters(), lr=LR) for name in ("one", "two")}


def torch_step(model, optimizers, batch):
    losses = {name: F.mse_loss(model[name](batch["inputs"])[:, 0], batch["targets"]) for name in ("one", "two")}
    for name, loss in losses.items():
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()
    return losses
