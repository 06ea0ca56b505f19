"""A decoder with grouped key heads, rotary embedding, RMSNorm and SwiGLU, in PyTorch."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN, LENGTH = 48, 24, 2, 4, 2, 8, 40, 9


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x, base=10000.0):
    """Rotate x of (B, H, T, D)."""
    dim = x.shape[-1]
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    freqs = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), inv_freq)
    emb = torch.cat((freqs, freqs), dim=-1)
    return x * emb.cos() + rotate_half(x) * emb.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, N_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, N_KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, N_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(N_HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, N_HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(B, T, N_KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(B, T, N_KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = apply_rotary(q), apply_rotary(k)
        k = k.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1)
        v = v.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(DIM), RMSNorm(DIM)
        self.attn, self.mlp = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.norm = RMSNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x * DIM**0.5
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


def torch_model():
    return Decoder()


def torch_loss(model, batch):
    """Only the answer's tokens count."""
    logits = model(batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:].masked_fill(batch["answer"][:, 1:] == 0, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 2))
    tokens = rng.integers(0, VOCAB, (4, LENGTH + 1)).cumsum(1) % VOCAB
    start = rng.integers(2, LENGTH - 2, (4, 1))
    return {"tokens": tokens, "answer": (np.arange(LENGTH + 1) >= start).astype(np.int64)}
