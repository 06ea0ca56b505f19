"""A text classifier in PyTorch: an encoder with padding masks, sinusoidal positions, lower rates in lower layers."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, CLASSES, LENGTH = 12, 8, 2, 2, 3, 6
LR, STEPS = 3e-3, 8


def positions(length, like):
    """Return sines and cosines of the positions, (T, WIDTH)."""
    rates = 100.0 ** (-torch.arange(0, WIDTH, 2, dtype=like.dtype) / WIDTH)
    angles = torch.arange(length, dtype=like.dtype)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Layer(nn.Module):
    """Post-norm, as in the first transformer."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x, valid):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :])
        x = self.norm1(x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens, segments, valid):
        x = self.tokens(tokens) + self.segments(segments) + positions(tokens.shape[1], self.norm.weight)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, valid)
        mean = (x * valid[..., None]).sum(dim=1) / valid.sum(dim=1, keepdim=True)
        first = torch.tanh(self.pooler(x[:, 0]))
        return self.classifier(torch.cat([mean, first], dim=-1))


def torch_model():
    return Encoder()


def torch_loss(model, batch):
    logits = model(batch["tokens"], batch["segments"], batch["valid"])
    return F.cross_entropy(logits, batch["label"], label_smoothing=0.1)


def configure_optimizers(model):
    parts = {"tokens": 0, "segments": 0, "norm": 0, "layers.0": 1, "layers.1": 2, "pooler": 3, "classifier": 3}
    groups = [
        {"params": model.get_submodule(name).parameters(), "lr": LR * 0.5 ** (3 - depth)}
        for name, depth in parts.items()
    ]
    optimizer = torch.optim.Adam(groups, lr=LR)
    return optimizer, torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=1.0)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    lengths = rng.integers(2, LENGTH + 1, 8)
    valid = np.arange(LENGTH) < lengths[:, None]
    segments = (np.arange(LENGTH) >= lengths[:, None] // 2).astype(int)
    tokens = np.where(valid, rng.integers(1, VOCAB, (8, LENGTH)), 0)
    return {"tokens": tokens, "segments": segments, "valid": valid, "label": rng.integers(0, CLASSES, 8)}
