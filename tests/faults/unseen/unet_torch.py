"""A U-Net that predicts the noise of images, in PyTorch."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, SIZE, TIME_DIM, GROUPS, WARMUP = 8, 8, 12, 4, 5


def timestep_embedding(t, dim=TIME_DIM):
    half = dim // 2
    freqs = torch.exp(-math.log(1000) * torch.arange(half, dtype=t.dtype) / half)
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, in_ch)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.emb = nn.Linear(TIME_DIM, 2 * out_ch)
        self.norm2 = nn.GroupNorm(GROUPS, out_ch)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.skip = nn.Conv2d(in_ch, out_ch, 1) if in_ch != out_ch else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(F.silu(h))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(TIME_DIM, TIME_DIM)
        self.conv_in = nn.Conv2d(2, CHANNELS, 3, padding=1)
        self.down1 = ResBlock(CHANNELS, CHANNELS)
        self.pool = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.middle = ResBlock(CHANNELS, 2 * CHANNELS)
        self.upconv = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
        self.up1 = ResBlock(2 * CHANNELS, CHANNELS)
        self.norm_out = nn.GroupNorm(GROUPS, CHANNELS)
        self.conv_out = nn.Conv2d(CHANNELS, 2, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t))
        skip = self.down1(self.conv_in(x), emb)
        h = self.middle(self.pool(skip), emb)
        h = self.upconv(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up1(torch.cat([h, skip], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


def torch_model():
    return UNet()


def torch_loss(model, batch):
    alpha_bar = torch.cos(batch["time"] * math.pi / 2).square()
    level = alpha_bar[:, None, None, None]
    noisy = level.sqrt() * batch["image"] + (1 - level).sqrt() * batch["noise"]
    predicted = model(noisy, 1000 * batch["time"])
    snr = alpha_bar / (1 - alpha_bar)
    weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / snr
    mse = F.mse_loss(predicted, batch["noise"], reduction="none").mean(dim=(1, 2, 3))
    return (weight * mse).mean()


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)


def torch_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 6))
    x, y = np.meshgrid(np.arange(SIZE), np.arange(SIZE))
    phase = rng.uniform(0, 6, (4, 2, 1, 1))
    return {
        "image": np.sin(x * phase + y / 2),
        "noise": rng.normal(0, 1, (4, 2, SIZE, SIZE)),
        "time": rng.uniform(0.05, 0.95, 4),
    }
