"""A pair of towers for pictures and captions with a learned temperature, in PyTorch."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

FEATURES, WORDS, LENGTH, WIDTH, SHARED, BATCH = 30, 25, 7, 20, 12, 6


class ResidualMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.ln(x))))


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(ResidualMLP(WIDTH), ResidualMLP(WIDTH))
        self.proj = nn.Linear(WIDTH, SHARED, bias=False)

    def forward(self, image):
        return self.proj(self.blocks(self.stem(image)))


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.block = ResidualMLP(WIDTH)
        self.proj = nn.Linear(WIDTH, SHARED, bias=False)

    def forward(self, text):
        mask = (text > 0).unsqueeze(-1)
        x = self.block(self.token(text) + self.position)
        x = (x * mask).sum(dim=1) / mask.sum(dim=1)
        return self.proj(x)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.textual = ImageTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.tensor([math.log(1 / 0.07)]))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.textual(text), dim=-1)
        return self.logit_scale.exp() * image_features @ text_features.t()


def torch_model():
    return Towers()


def torch_loss(model, batch):
    logits_per_image = model(batch["image"], batch["text"])
    labels = torch.arange(len(logits_per_image))
    image_loss = F.cross_entropy(logits_per_image, labels)
    text_loss = F.cross_entropy(logits_per_image.t(), labels)
    return (image_loss + text_loss) / 2


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 4))
    lengths = rng.integers(2, LENGTH + 1, (BATCH, 1))
    text = np.where(np.arange(LENGTH) < lengths, rng.integers(1, WORDS, (BATCH, LENGTH)), 0)
    image = rng.normal(0, 1, (BATCH, FEATURES)) + np.sin(text.sum(1, keepdims=True) * np.arange(FEATURES) / 9)
    return {"image": image, "text": text}
