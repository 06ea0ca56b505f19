"""A masked auto-encoder of small images, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SIZE, PATCH, DIM, HEADS, DECODER_DIM, KEEP = 8, 2, 16, 2, 12, 6
PATCHES = (SIZE // PATCH) ** 2


class Attention(nn.Module):
    def __init__(self, dim, num_heads=HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = (f(x).reshape(B, N, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        attn = (q @ k.transpose(-2, -1)) * self.scale
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def patchify(imgs):
    """Cut (B, 3, H, W) into (B, L, PATCH PATCH 3)."""
    n = SIZE // PATCH
    x = imgs.reshape(len(imgs), 3, n, PATCH, n, PATCH)
    x = torch.einsum("nchpwq->nhwpqc", x)
    return x.reshape(len(imgs), n * n, PATCH**2 * 3)


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH**2 * 3, DIM)
        self.cls_token = nn.Parameter(0.2 * torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, PATCHES + 1, DIM))
        self.blocks = nn.ModuleList([Block(DIM), Block(DIM)])
        self.norm = nn.LayerNorm(DIM)
        self.decoder_embed = nn.Linear(DIM, DECODER_DIM)
        self.mask_token = nn.Parameter(0.2 * torch.randn(1, 1, DECODER_DIM))
        self.decoder_pos_embed = nn.Parameter(0.2 * torch.randn(1, PATCHES + 1, DECODER_DIM))
        self.decoder_block = Block(DECODER_DIM)
        self.decoder_norm = nn.LayerNorm(DECODER_DIM)
        self.decoder_pred = nn.Linear(DECODER_DIM, PATCH**2 * 3)

    def forward(self, patches, noise):
        B = len(patches)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :KEEP]
        mask = (ids_restore >= KEEP).to(patches.dtype)

        x = self.patch_embed(patches) + self.pos_embed[:, 1:]
        x = torch.gather(x, 1, ids_keep.unsqueeze(-1).expand(-1, -1, DIM))
        cls = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([cls.expand(B, -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))

        mask_tokens = self.mask_token.expand(B, PATCHES - KEEP, -1)
        y = torch.cat([x[:, 1:], mask_tokens], dim=1)
        y = torch.gather(y, 1, ids_restore.unsqueeze(-1).expand(-1, -1, DECODER_DIM))
        y = torch.cat([x[:, :1], y], dim=1) + self.decoder_pos_embed
        pred = self.decoder_pred(self.decoder_norm(self.decoder_block(y)))
        return pred[:, 1:], mask


def torch_model():
    return MaskedAutoencoder()


def torch_loss(model, batch):
    target = patchify(batch["image"])
    pred, mask = model(target, batch["order"])
    mean = target.mean(dim=-1, keepdim=True)
    var = target.var(dim=-1, keepdim=True)
    target = (target - mean) / (var + 1e-6).sqrt()
    loss = ((pred - target) ** 2).mean(dim=-1)
    return (loss * mask).sum() / mask.sum()


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 7))
    waves = np.sin(rng.uniform(0.3, 1.5, (5, 3, 1, 1)) * np.arange(SIZE) + rng.normal(0, 1, (5, 1, SIZE, 1)))
    return {"image": waves + rng.normal(0, 0.3, waves.shape), "order": rng.random((5, PATCHES))}
