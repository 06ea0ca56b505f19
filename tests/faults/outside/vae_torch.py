"""A variational autoencoder in PyTorch, with a floor under the divergence and bounds of the variance."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

INPUTS, HIDDEN, LATENT = 8, 8, 3
BETA, FREE_BITS = 0.5, 0.125


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(INPUTS, HIDDEN)
        self.mean = nn.Linear(HIDDEN, LATENT)
        self.logvar = nn.Linear(HIDDEN, LATENT)
        self.decode = nn.Linear(LATENT, HIDDEN)
        self.pixels = nn.Linear(HIDDEN, INPUTS)

    def forward(self, x):
        h = F.softplus(self.encode(x), beta=2.0)
        mean, logvar = self.mean(h), self.logvar(h).clamp(-0.3, 0.2)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        return self.pixels(F.mish(self.decode(z))), mean, logvar


def torch_model():
    return VAE()


def torch_loss(model, batch):
    logits, mean, logvar = model(batch["x"])
    reconstruction = F.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none").sum(dim=-1)
    divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp())
    divergence = divergence.clamp(min=FREE_BITS).sum(dim=-1)
    return (reconstruction + BETA * divergence).mean()


def torch_optimizer(parameters):
    return torch.optim.Adamax(parameters, lr=1e-2)


def batch(step, rank):
    return {"x": np.random.default_rng((step, rank)).uniform(0, 1, (8, INPUTS))}
