"""A tagger in PyTorch: an LSTM that reads a text in two chunks, then a bidirectional GRU."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HIDDEN, TAGS, LENGTH = 10, 6, 5, 4, 6
clip_grad_norm = 0.3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, words):
        x = F.dropout(self.embedding(words), 0.25, self.training)
        first, second = x.chunk(2, dim=1)
        one, (h, c) = self.lstm(first)
        two, _ = self.lstm(second, (h.detach(), c.detach()))
        both, _ = self.gru(torch.cat([one, two], dim=1))
        return self.tags(both)


def torch_model():
    return Tagger()


def torch_loss(model, batch):
    losses = F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["tags"].flatten(), reduction="none")
    valid = batch["valid"].flatten()
    return (losses * valid).sum() / valid.sum()


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05)


def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    valid = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, 8)[:, None]
    return {
        "words": rng.integers(0, VOCAB, (8, LENGTH)),
        "tags": rng.integers(0, TAGS, (8, LENGTH)),
        "valid": valid.astype(float),
    }
