"""A network that finds edges, in PyTorch: resized image, convolution, transposed convolution, upsampling."""

import torch
from torch import nn
from torch.nn import functional as F

LR = 1e-3


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        x = F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True)
        x = F.relu(self.up(F.relu(self.conv(x))))
        x = F.interpolate(x, size=(16, 20), mode="bilinear", align_corners=False)
        return self.head(x)[:, 0]


def torch_model():
    return Segmenter()


def torch_loss(model, batch):
    edges = batch["edges"]
    weight = torch.where(edges > 0.5, 1.5, 0.5).to(edges.dtype)
    return F.binary_cross_entropy_with_logits(model(batch["image"]), edges, weight, reduction="mean")


def torch_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=LR)
