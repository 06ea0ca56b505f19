"""Quantile regression of tables: periodic features, embeddings and BatchNorm, in PyTorch."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

NUMERIC, CARDINALITIES, FREQUENCIES, EMBEDDING, WIDTH = 5, (6, 8, 9), 3, 4, 24
QUANTILES = (0.1, 0.5, 0.9)


class Periodic(nn.Module):
    def __init__(self, n_features, n_frequencies):
        super().__init__()
        self.coefficients = nn.Parameter(0.3 * torch.randn(n_features, n_frequencies))

    def forward(self, x):
        v = 2 * math.pi * self.coefficients * x[..., None]
        return torch.cat([v.cos(), v.sin()], dim=-1).flatten(1)


class ResidualLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = self.norm(x)
        z = F.relu(self.linear1(z))
        return x + self.linear2(z)


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.periodic = Periodic(NUMERIC, FREQUENCIES)
        self.embeddings = nn.ModuleList(nn.Embedding(n, EMBEDDING) for n in CARDINALITIES)
        inputs = 2 * NUMERIC * FREQUENCIES + EMBEDDING * len(CARDINALITIES)
        self.first = nn.Linear(inputs, WIDTH)
        self.layers = nn.ModuleList([ResidualLayer(), ResidualLayer()])
        self.head = nn.Linear(WIDTH, len(QUANTILES))

    def forward(self, x_num, x_cat):
        x = [self.periodic(x_num)]
        x += [embedding(x_cat[:, i]) for i, embedding in enumerate(self.embeddings)]
        x = self.first(torch.cat(x, dim=1))
        for layer in self.layers:
            x = layer(x)
        return self.head(F.relu(x))


def torch_model():
    return TabularNet()


def torch_loss(model, batch):
    prediction = model(batch["x_num"], batch["x_cat"])
    quantiles = torch.tensor(QUANTILES, dtype=prediction.dtype)
    error = batch["y"].unsqueeze(1) - prediction
    loss = torch.maximum(quantiles * error, (quantiles - 1) * error)
    return loss.sum(dim=1).mean()


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-2)


def batch(step, rank):
    rng = np.random.default_rng((step, rank, 12))
    x_num = rng.normal(0, 1, (8, NUMERIC))
    x_cat = np.stack([rng.integers(0, n, 8) for n in CARDINALITIES], axis=1)
    return {"x_num": x_num, "x_cat": x_cat, "y": np.sin(2 * x_num[:, 0]) + 0.3 * x_cat[:, 1] + rng.normal(0, 0.3, 8)}
