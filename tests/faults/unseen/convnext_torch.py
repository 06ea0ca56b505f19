"""A small ConvNeXt V2 that classifies textures, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CLASSES, DIMS, DEPTHS = 5, (8, 16), (1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images (B, C, H, W)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GRN(nn.Module):
    """Global response normalization of images (B, H, W, C)."""

    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.randn(dim))
        self.beta = nn.Parameter(0.5 * torch.randn(dim))

    def forward(self, x):
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * nx) + self.beta + x


class Block(nn.Module):
    def __init__(self, dim, layer_scale=0.3):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = self.norm(x.permute(0, 2, 3, 1))
        x = self.grn(F.gelu(self.pwconv1(x)))
        x = self.gamma * self.pwconv2(x)
        return shortcut + x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, DIMS[0], 2, stride=2), ChannelNorm(DIMS[0], eps=1e-6)),
                nn.Sequential(ChannelNorm(DIMS[0], eps=1e-6), nn.Conv2d(DIMS[0], DIMS[1], 2, stride=2)),
            ]
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(Block(dim) for _ in range(depth))) for dim, depth in zip(DIMS, DEPTHS, strict=True)
        )
        self.norm = nn.LayerNorm(DIMS[-1], eps=1e-6)
        self.head = nn.Linear(DIMS[-1], CLASSES)

    def forward(self, x):
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        x = x.mean([-2, -1])
        return self.head(self.norm(x))


def torch_model():
    return ConvNeXt()


def torch_loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)


def configure_optimizers(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.05)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 1))
    label = rng.integers(0, CLASSES, 4)
    waves = np.sin(np.outer(1 + label, np.arange(16) / 2))[:, None, :, None]
    return {"image": rng.normal(0.2, 0.7, (4, 3, 16, 12)) + waves, "label": label}
