"""A small correct port as text, which tests write to a file; they plant faults by replacing pieces."""

from pathlib import Path

Change = tuple[str, str]  # a piece of the port, and its replacement

# Only the JAX half imports jax, so that torch ranks start fast.
PORT = """
import os, time
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

def jax_model():
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

def jax_loss(model, batch):
    from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
    return cross_entropy(model(batch["x"]), batch["y"]).mean()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}

optimizer = "sgd"
"""


# Ranks have 12, 6, ... examples at every other step, and all have 12 at the others.
UNEQUAL: Change = (
    """    return {"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}""",
    """    size = 12 // (1 + rank * (step % 2 == 0))
    return {"x": rng.normal(1, 1, (size, 3)), "y": rng.integers(0, 4, size)}""",
)


def replaced(text: str, *changes: Change) -> str:
    """Return a text with pieces replaced, each of which it must have."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def write(folder: Path, *changes: Change, more: str = "", text: str = PORT) -> Path:
    """Write a port with pieces replaced, and `more` appended; return the path."""
    path = folder / "port.py"
    path.write_text(replaced(text, *changes) + more)
    return path


def line_of(path: Path, piece: str) -> str:
    """Return the line that contains a piece, as in "port.py: line 3"."""
    (number,) = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if piece in line]
    return f"{path}: line {number}"


def own_optimizers(torch: str, optax: str) -> Change:
    """Return the change that gives each side an optimizer, in place of the shared one."""
    imports = "import optax\n" + "import jaxddp.optim\n" * ("jaxddp." in optax)
    text = f"def torch_optimizer(parameters): return torch.optim.{torch}\n{imports}jax_optimizer = {optax}\n"
    return 'optimizer = "sgd"\n', text


def at_start_of(function: str, code: str) -> Change:
    """Return the change that puts code at the start of a function."""
    return f"def {function}:\n", f"def {function}:\n    {code}\n"


def wide(width: int) -> list[Change]:
    """Return the changes that put a norm and a layer (width, width) between the two layers."""
    return [
        ("torch.nn.Linear(3, 5)", f"torch.nn.Linear(3, {width})"),
        (
            "torch.nn.Linear(5, 4)",
            f"torch.nn.Linear({width}, 4); self.norm = torch.nn.LayerNorm({width}); "
            f"self.wide = torch.nn.Linear({width}, {width})",
        ),
        ("torch.tanh(self.fc1(x))", "torch.tanh(self.wide(self.norm(self.fc1(x))))"),
        ("nnx.Linear(3, 5, rngs=rngs)", f"nnx.Linear(3, {width}, rngs=rngs)"),
        (
            "nnx.Linear(5, 4, rngs=rngs)",
            f"nnx.Linear({width}, 4, rngs=rngs)\n"
            f"            self.norm = nnx.LayerNorm({width}, epsilon=1e-5, rngs=rngs)\n"
            f"            self.wide = nnx.Linear({width}, {width}, rngs=rngs)",
        ),
        ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.wide(self.norm(self.fc1(x))))"),
    ]


# A layer of jax under another name.
RENAMED: list[Change] = [("self.fc1 = nnx", "self.inner = nnx"), ("nnx.tanh(self.fc1", "nnx.tanh(self.inner")]
# A linen module in place of the nnx one, but for its layers and their calls.
LINEN: list[Change] = [
    ("class FlaxNet(nnx.Module):\n        def __init__(self, rngs):\n", "class FlaxNet(linen.Module):\n"),
    ("            self.fc1 = nnx.Linear(3, 5, rngs=rngs)\n            self.fc2 = nnx.Linear(5, 4, rngs=rngs)\n", ""),
    ("        def __call__", "        @linen.compact\n        def __call__"),
    ("FlaxNet(nnx.Rngs(0))", "FlaxNet()"),
]
# Images (N, H, W, C) for jax of a `torch_batch` that has them as (N, C, H, W).
FLAX_IMAGES = """
def jax_batch(step, rank):
    found = torch_batch(step, rank)
    return found | {"x": found["x"].transpose(0, 2, 3, 1)}
"""


# A correct replica step with clipping, which returns the stages named in SHOWS.
STEP = """
clip_grad_norm = 0.05
SHOWS = ("local_loss", "local_gradients", "gradients", "clipped_gradients")

def jax_step(loss, optimizer, state, batch):
    import jax, optax
    from jaxddp.state import TrainState
    (value, buffers), local = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    gradients = jax.lax.pmean(local, "replica")
    share = jax.numpy.minimum(1, clip_grad_norm / (optax.tree.norm(gradients) + 1e-6))
    clipped = jax.tree.map(lambda g: g * share, gradients)
    updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    every = dict(local_loss=value, local_gradients=local, gradients=gradients, clipped_gradients=clipped)
    return TrainState(state.step + 1, params, buffers, opt_state), {name: every[name] for name in SHOWS}
"""


SHOWS_NOTHING: Change = ('("local_loss", "local_gradients", "gradients", "clipped_gradients")', "()")
BY_NORM = "share = jax.numpy.minimum(1, clip_grad_norm / (optax.tree.norm(gradients) + 1e-6))"
CLIPS_BY_VALUE: list[Change] = [
    ("clip_grad_norm = 0.05", "clip_grad_value = most = 0.01"),
    (BY_NORM, ""),
    ("lambda g: g * share", "lambda g: g.clip(-most, most)"),
]


def step(*changes: Change) -> str:
    """Return `STEP` with pieces replaced."""
    return replaced(STEP, *changes)
