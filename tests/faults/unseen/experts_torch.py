"""A layer of attention and a sparse mixture of experts that tags tokens, in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, TAGS, LENGTH, D_MODEL, N_HEADS, N_EXPERTS, D_FF, TOP_K = 18, 6, 6, 16, 4, 5, 20, 2
BALANCE_COEF, Z_COEF = 0.05, 0.01


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleDict({name: nn.Linear(D_MODEL, D_MODEL, bias=False) for name in ("q", "k", "v")})
        self.proj = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def split(self, x):
        return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in self.qkv.values())
        att = (q @ k.transpose(-1, -2)) * (D_MODEL // N_HEADS) ** -0.5
        y = att.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D_MODEL, N_EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=0.6)
        self.w1 = nn.Parameter(torch.randn(N_EXPERTS, D_MODEL, D_FF) / D_MODEL**0.5)
        self.b1 = nn.Parameter(torch.zeros(N_EXPERTS, D_FF))
        self.w2 = nn.Parameter(torch.randn(N_EXPERTS, D_FF, D_MODEL) / D_FF**0.5)

    def forward(self, x):
        tokens = x.reshape(-1, D_MODEL)
        router_logits = self.router(tokens)
        top_logits, top_idx = router_logits.topk(TOP_K, dim=-1)
        top_weights = top_logits.softmax(dim=-1)
        y = torch.zeros_like(tokens)
        for e in range(N_EXPERTS):
            weight = (top_weights * (top_idx == e)).sum(-1, keepdim=True)
            y = y + weight * (F.gelu(tokens @ self.w1[e] + self.b1[e]) @ self.w2[e])

        probs = router_logits.softmax(dim=-1)
        first = F.one_hot(top_idx[:, 0], N_EXPERTS).to(probs.dtype)
        balance_loss = N_EXPERTS * (probs.mean(0) * first.mean(0)).sum()
        z_loss = router_logits.logsumexp(dim=-1).pow(2).mean()
        return y.view_as(x), BALANCE_COEF * balance_loss + Z_COEF * z_loss


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.pos = nn.Embedding(LENGTH, D_MODEL)
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.attn, self.moe = SelfAttention(), MoE()
        self.head = nn.Linear(D_MODEL, TAGS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos.weight
        x = x + self.attn(self.norm1(x))
        y, aux = self.moe(self.norm2(x))
        return self.head(x + y), aux


def torch_model():
    return Tagger()


def torch_loss(model, batch):
    logits, aux = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten()) + aux


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 5))
    tokens = rng.integers(0, VOCAB, (4, LENGTH))
    return {"tokens": tokens, "tags": (tokens + np.roll(tokens, 1, axis=1)) % TAGS}
