"""A network that solves the equation of a damped oscillator, in PyTorch."""

import torch
from torch import nn

DAMPING, STIFFNESS = 4.0, 400.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 12)
        self.second = nn.Linear(12, 12)
        self.last = nn.Linear(12, 1)

    def forward(self, t):
        t = t.requires_grad_(True)
        u = self.last(torch.tanh(self.second(torch.tanh(self.first(t)))))
        speed = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        acceleration = torch.autograd.grad(speed.sum(), t, create_graph=True)[0]
        return u, speed, acceleration


def torch_model():
    return Net()


def torch_loss(model, batch):
    u, speed, acceleration = model(batch["t"])
    physics = acceleration + DAMPING * speed + STIFFNESS * u
    return 1e-4 * (physics**2).mean() + ((u - batch["u"]) ** 2).mean()


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
