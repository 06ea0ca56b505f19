"""A conditional normalizing flow, whose condition is a quantised code, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

DIM, OBSERVED, CODE, CODES, HIDDEN, STEPS, COMMITMENT = 6, 5, 4, 7, 32, 5, 0.25


class Quantizer(nn.Module):
    """Vector quantization with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.codebook = nn.Embedding(CODES, CODE)

    def forward(self, z):
        distances = torch.cdist(z, self.codebook.weight, compute_mode="donot_use_mm_for_euclid_dist")
        q = self.codebook(distances.argmin(dim=1))
        codebook_loss = F.mse_loss(q, z.detach())
        commitment_loss = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), codebook_loss + COMMITMENT * commitment_loss


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(0.3 * torch.randn(DIM))
        self.log_scale = nn.Parameter(0.3 * torch.randn(DIM))

    def forward(self, x):
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class AffineCoupling(nn.Module):
    """The first half, and the condition, move the second half."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM // 2 + CODE, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, DIM))

    def forward(self, x, condition):
        xa, xb = x.chunk(2, dim=1)
        s, t = self.net(torch.cat([xa, condition], dim=1)).chunk(2, dim=1)
        s = 2 * torch.tanh(s / 2)
        yb = (xb + t) * torch.exp(s)
        return torch.cat([xa, yb], dim=1), s.sum(dim=1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(OBSERVED, CODE)
        self.quantizer = Quantizer()
        self.actnorms = nn.ModuleList(ActNorm() for _ in range(STEPS))
        self.couplings = nn.ModuleList(AffineCoupling() for _ in range(STEPS))

    def forward(self, x, observed):
        condition, vq_loss = self.quantizer(self.encoder(observed))
        log_det = torch.zeros(len(x), dtype=x.dtype)
        for actnorm, coupling in zip(self.actnorms, self.couplings, strict=True):
            x, of_norm = actnorm(x)
            x, of_coupling = coupling(x.flip(1), condition)
            log_det = log_det + of_norm + of_coupling
        return x, log_det, vq_loss


def torch_model():
    return Flow()


def torch_loss(model, batch):
    z, log_det, vq_loss = model(batch["x"], batch["observed"])
    log_prob = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(dim=1)
    return -(log_prob + log_det).mean() + vq_loss


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.8, 0.99))


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 10))
    observed = rng.normal(0, 1.5, (6, OBSERVED))
    return {"observed": observed, "x": np.tanh(observed[:, :1]) + rng.normal(0, 1, (6, DIM)) * rng.uniform(0.5, 2, DIM)}
