"""Schedule-free AdamW in PyTorch: gradients at y, between the iterates z and their mean x."""

import torch
from torch import nn
from torch.nn import functional as F

LR, BETA1, BETA2, EPS, DECAY = 2e-3, 0.9, 0.999, 1e-8, 0.1


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self):
        for y in self.param_groups[0]["params"]:
            if not self.state[y]:
                self.state[y] = {"step": 0, "total": 0.0, "z": y.clone(), "v": torch.zeros_like(y)}
            state = self.state[y]
            state["step"] += 1
            state["total"] += LR**2
            x = (y - (1 - BETA1) * state["z"]) / BETA1
            state["v"].mul_(BETA2).addcmul_(y.grad, y.grad, value=1 - BETA2)
            root = (state["v"] / (1 - BETA2 ** state["step"])).sqrt()
            direction = y.grad / (root + EPS) + DECAY * y
            state["z"] -= LR * direction
            share = LR**2 / state["total"]
            x = (1 - share) * x + share * state["z"]
            y.copy_(BETA1 * x + (1 - BETA1) * state["z"])


def torch_model():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))


def torch_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def torch_optimizer(parameters):
    return ScheduleFree(parameters)
