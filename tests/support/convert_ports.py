"""Ports for the command that converts weights, as text, and what its tests do with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxddp.parity.convert.command import run as convert
from jaxddp.parity.port import Port, load_port

PORT = """
import numpy as np, optax, torch
from flax import linen, nnx
from jaxddp.nn.layers import BatchNorm

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(self.attention(x, x, x)[0].sum(1)))

class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.bn = NORM
    def __call__(self, x):
        return self.embed.attend(self.bn(self.attention(self.embed(x)).sum(1)))

class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        embed = linen.Embed(6, 4, name="embed")
        x = linen.MultiHeadDotProductAttention(2, name="attention")(embed(x))
        return embed.attend(linen.BatchNorm(False, name="bn")(x.sum(1)))

def torch_model(): return TorchNet()
def jax_model(): return MODEL
def torch_loss(model, batch): return model(batch["x"]).sum()
def jax_loss(model, batch): return model(batch["x"]).sum()
def batch(step, rank): return {"x": np.ones((2, 3), np.int32)}
optimizer = "sgd"
names = {"bn": "norm"}
"""


MODELS = {
    "nnx": {"MODEL": "FlaxNet(nnx.Rngs(0))", "NORM": "BatchNorm(4)"},
    "nnx, no counter": {"MODEL": "FlaxNet(nnx.Rngs(0))", "NORM": "nnx.BatchNorm(4, rngs=rngs)"},
    "linen": {"MODEL": "LinenNet()"},
}


def write_port(model: str = "nnx") -> Port:
    text = PORT
    for word, code in MODELS[model].items():
        text = text.replace(word, code)
    Path("port.py").write_text(text)
    return load_port("port.py")


def weights(port: Port, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Make a state_dict of distinct values whose tensors share no memory."""
    module = port.torch_model().to(dtype)
    for number, tensor in enumerate(module.state_dict().values(), start=1):
        values = torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number
        tensor.copy_(values / 512 if tensor.is_floating_point() else values)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command, which must fail and write nothing, and return its one line of error."""
    before = sorted(path.name for path in Path().iterdir())
    with pytest.raises(SystemExit) as stop:
        convert(argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert sorted(path.name for path in Path().iterdir()) == before
    line, *frames = captured.err.splitlines()
    assert all(frame.startswith("  ") for frame in frames)
    return line.removeprefix("error: ")


def change(path: str, name: str, value: Any) -> None:
    tensors = load_file(path)
    changed = {**tensors, name: value}
    save_file({name: x for name, x in changed.items() if x is not None}, path)


ARRANGED = """
import numpy as np, torch
from jaxddp.parity import flattened, part

def torch_model():
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 8) for _ in range(2)])
    return torch.nn.ModuleDict({"layers": layers, "fc": torch.nn.Linear(6, 2)})
def jax_model():
    shapes = {"a": (2, 4, 4), "b": (2, 4, 4), "fc": (6, 2)}
    layers = {name: {"kernel": np.zeros(x), "bias": np.zeros((*x[:-2], x[-1]))} for name, x in shapes.items()}
    return {"blocks": {name: layers.pop(name) for name in "ab"}, **layers}
def torch_loss(model, batch): return 0
def jax_loss(model, batch): return 0
def batch(step, rank): return {}
optimizer = "sgd"
names = {
    "blocks.a": part("layers.{}", 0, of=2),
    "blocks.b": part("layers.{}", 1, of=2),
    "fc": flattened("fc", (3, 2)),
}
"""
