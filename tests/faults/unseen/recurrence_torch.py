"""Selective state spaces that predict time series with their variance, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SERIES, D_MODEL, N_LAYERS, N_HEADS, HEAD_DIM, D_STATE, D_CONV, LENGTH = 3, 18, 2, 4, 4, 3, 3, 8
D_INNER = N_HEADS * HEAD_DIM


class GatedRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x, z):
        x = x * F.silu(z)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(D_MODEL, 2 * D_INNER + 2 * D_STATE + N_HEADS, bias=False)
        self.conv1d = nn.Conv1d(D_INNER, D_INNER, D_CONV, groups=D_INNER, padding=D_CONV - 1)
        self.dt_bias = nn.Parameter(torch.randn(N_HEADS) - 1)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, N_HEADS + 1).float()))
        self.D = nn.Parameter(torch.ones(N_HEADS))
        self.norm = GatedRMSNorm(D_INNER)
        self.out_proj = nn.Linear(D_INNER, D_MODEL, bias=False)

    def forward(self, u):
        batch, length, _ = u.shape
        z, x, B, C, dt = self.in_proj(u).split([D_INNER, D_INNER, D_STATE, D_STATE, N_HEADS], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2)
        x = F.silu(x).view(batch, length, N_HEADS, HEAD_DIM)
        dt = F.softplus(dt + self.dt_bias)
        A = -torch.exp(self.A_log)
        state = torch.zeros(batch, N_HEADS, HEAD_DIM, D_STATE, dtype=u.dtype)
        ys = []
        for t in range(length):
            decay = torch.exp(dt[:, t] * A)[..., None, None]
            dBx = torch.einsum("bh,bn,bhp->bhpn", dt[:, t], B[:, t], x[:, t])
            state = decay * state + dBx
            ys.append(torch.einsum("bhpn,bn->bhp", state, C[:, t]))
        y = torch.stack(ys, dim=1) + x * self.D[:, None]
        return self.out_proj(self.norm(y.flatten(2), z))


class StateSpaceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(SERIES, D_MODEL)
        self.norms = nn.ModuleList(nn.LayerNorm(D_MODEL) for _ in range(N_LAYERS))
        self.mixers = nn.ModuleList(Mixer() for _ in range(N_LAYERS))
        self.decoder = nn.Linear(D_MODEL, 2 * SERIES)

    def forward(self, series):
        x = self.encoder(series)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.decoder(x).chunk(2, dim=-1)


def torch_model():
    return StateSpaceModel()


def torch_loss(model, batch):
    series = batch["series"]
    mean, log_var = model(series[:, :-1])
    return (log_var + (series[:, 1:] - mean) ** 2 / log_var.exp()).mean() / 2


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 9))
    waves = np.sin(rng.uniform(0.5, 2, (4, 1, SERIES)) * np.arange(LENGTH + 1)[:, None] + rng.normal(0, 2, (4, 1, 1)))
    return {"series": waves + rng.normal(0, 0.2, waves.shape)}
