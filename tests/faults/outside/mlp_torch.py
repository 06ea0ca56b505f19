"""A regressor in PyTorch: an MLP with a gated residual branch, and SGD whose rate falls along a cosine."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

EXAMPLES, BATCH, REPLICAS = 64, 8, 2
LR, MOMENTUM, STEPS = 0.1, 0.9, 10
steps_per_epoch = EXAMPLES // (BATCH * REPLICAS)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = (x - 0.5) / 0.25
        x = F.leaky_relu(self.fc1(x), 0.2)
        h = self.norm(x)
        x = x + F.silu(self.gate(h)) * self.up(h)
        return 0.5 * self.head(x)


def torch_model():
    return Regressor()


def torch_loss(model, batch):
    return F.huber_loss(model(batch["x"]), batch["y"], delta=0.5)


def torch_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def torch_scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def dataset():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (EXAMPLES, 6))
    return x, np.stack([x[:, 0] - x[:, 1], 4 * x[:, 2] * x[:, 3], 3 * np.sin(9 * x[:, 4])], axis=1)


def torch_batch(step, rank):
    """Return the batch of a replica, as DistributedSampler deals it: every second example of the shuffled epoch."""
    x, y = dataset()
    epoch, at = divmod(step, steps_per_epoch)
    order = np.random.default_rng(epoch).permutation(EXAMPLES)
    chosen = order[rank::REPLICAS][at * BATCH : (at + 1) * BATCH]
    return {"ids": chosen, "x": x[chosen], "y": y[chosen]}
