"""A small GPT in PyTorch: rotary positions, a mixture of experts, tied embeddings, AdamW with warm-up and cosine."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, EXPERTS, TOP = 11, 8, 2, 2, 3, 2
LR, WARMUP, STEPS, LAST = 1e-2, 2, 8, 0.1


def rotary(x):
    """Rotate the two halves of each head by the position, (B, H, T, D)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scores = rotary(q) @ rotary(k).transpose(-2, -1) / math.sqrt(c // HEADS)
        visible = torch.ones(t, t, dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        values, chosen = self.router(x).softmax(dim=-1).topk(TOP, dim=-1)
        values = values / values.sum(dim=-1, keepdim=True)
        shares = (F.one_hot(chosen, EXPERTS) * values[..., None]).sum(dim=-2)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * shares[..., None, :]).sum(dim=-1)


class Block(nn.Module):
    """Attention, and one expert or several; every second block has several."""

    def __init__(self, number):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = Experts() if number % 2 else Expert()

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens) * math.sqrt(WIDTH)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.embed.weight)
        return 5.0 * torch.tanh(logits / 5.0)


def torch_model():
    return GPT()


def torch_loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def configure_optimizers(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))

    def factor(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def batch(step, rank):
    return {"tokens": np.random.default_rng((step, rank)).integers(0, VOCAB, (4, 7))}
