"""Contrastive training of two towers in PyTorch: symmetric InfoNCE, a margin loss, a stopped target."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, OUT, IMAGE, WORDS = 8, 5, 6, 7


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.fc1 = nn.Linear(inputs, WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        h = h + F.softplus(self.fc2(h))
        return F.normalize(self.project(h), dim=-1)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(IMAGE)
        self.text = Tower(WORDS)
        self.predictor = nn.Linear(OUT, OUT)

    def forward(self, image, text):
        a, b = self.image(image), self.text(text)
        return a, b, self.predictor(a)


def torch_model():
    return Towers()


def torch_loss(model, batch):
    a, b, predicted = model(batch["image"], batch["text"])
    logits = a @ b.T / 0.2
    labels = torch.arange(len(a))
    contrastive = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    others = (a @ b.T).masked_fill(torch.eye(len(a), dtype=torch.bool), -1.0)
    hardest = others.topk(3, dim=-1).values.mean(dim=-1)
    margin = F.relu(0.3 + hardest - (a * b).sum(dim=-1)).mean()
    alignment = -F.cosine_similarity(predicted, b.detach(), dim=-1).mean()
    return contrastive + 0.5 * margin + 0.25 * alignment


def torch_optimizer(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-3)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"image": rng.normal(0.2, 1, (8, IMAGE)), "text": rng.normal(0.2, 1, (8, WORDS))}
