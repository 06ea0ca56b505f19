"""A small port that is right, as text: tests write it into a file, and plant what is wrong by replacing pieces."""

from pathlib import Path

# Only what jax runs imports flax, so that a torch rank gets to the model soon.
PORT = """
import os, sys, time
import numpy as np
import torch
from torch.nn import functional as F

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(3, 5)
        self.fc2 = torch.nn.Linear(5, 4)
    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))

def torch_model():
    return TorchNet()

def flax_model():
    from flax import nnx
    class FlaxNet(nnx.Module):
        def __init__(self, rngs):
            self.fc1 = nnx.Linear(3, 5, rngs=rngs)
            self.fc2 = nnx.Linear(5, 4, rngs=rngs)
        def __call__(self, x):
            return self.fc2(nnx.tanh(self.fc1(x)))
    return FlaxNet(nnx.Rngs(0))

def torch_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def flax_loss(model, batch):
    import optax
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}

optimizer = "sgd"
"""


def write(folder: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """The port in a file, with pieces replaced, and more at its end."""
    text = PORT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "port.py"
    path.write_text(text + more)
    return path
