"""A denoising diffusion model in PyTorch: linear noise schedule, weighted loss, an average of the weights (EMA)."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INPUTS, TIMES = 8, 4, 10


def alphas_bar(like):
    """Return the part of the signal's variance that is left at each time."""
    betas = torch.linspace(1e-4, 0.2, TIMES, dtype=like.dtype)
    return torch.cumprod(1 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(WIDTH, WIDTH)
        self.into = nn.Linear(INPUTS, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, INPUTS)

    def forward(self, x, t):
        rates = 1000.0 ** (-torch.arange(WIDTH // 2, dtype=x.dtype) / (WIDTH // 2))
        angles = t[:, None] * rates
        time = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)))
        h = F.silu(self.into(x)) + time
        return self.out(F.silu(self.mid(h)))


def torch_model():
    model = nn.ModuleDict({"net": Denoiser()})
    model["ema"] = copy.deepcopy(model["net"]).requires_grad_(False)
    return model


def configure_optimizers(model):
    return torch.optim.Adam(model["net"].parameters(), lr=1e-2)


def diffusion_loss(net, x, t, noise):
    signal = alphas_bar(x)[t][:, None]
    noisy = signal.sqrt() * x + (1 - signal).sqrt() * noise
    predicted = net(noisy, t)
    snr = signal / (1 - signal)
    weights = torch.clamp(snr, max=5.0) / snr
    return (weights * (predicted - noise).pow(2)).mean()


def torch_step(model, optimizer, batch):
    loss = diffusion_loss(model["net"], batch["x"], batch["t"], batch["noise"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, new in zip(model["ema"].parameters(), model["net"].parameters(), strict=True):
            average.mul_(0.99).add_(new, alpha=0.01)
    return loss


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    x, noise = rng.normal(0, 1, (2, 8, INPUTS))
    return {"x": x, "noise": noise, "t": rng.integers(0, TIMES, 8)}
