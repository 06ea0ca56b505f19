"""A program in both frameworks, small, and its variants."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxddp import train as jax_trainer
from jaxddp.program import default_config, load_program
from tests.support.train_runs import records
from torch_ref.config import TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import train as torch_train

Change = tuple[str, str]

LINE = 'epochs, global_batch_size, optimizer, lr = 2, 16, "sgd", 0.05'
LOSS_TOLERANCE = 1e-12  # relative; measured: 2e-16 to 4e-15
FLAGS: dict[str, Any] = {"devices": 2, "platform": "cpu", "dtype": "float64"}

FILE = '''
from dataclasses import dataclass

import jax
import numpy as np
import torch
from flax import nnx
from jax import numpy as jnp

epochs, global_batch_size, optimizer, lr = 2, 16, "sgd", 0.05


@dataclass
class Options:
    """Sizes."""

    width: int = 4
    """Width of the hidden layer."""


def data(size, seed):
    x = np.random.default_rng(seed).standard_normal((size, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], np.float32)}


def train_data():
    return data(75, 0)


def test_data():
    return data(21, 1)


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.fc1 = nnx.Linear(3, width, rngs=rngs)
        self.fc2 = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.tanh(self.fc1(x)))[:, 0]


def jax_model(options, config):
    return Net(options.width, nnx.Rngs(config.seed))


def jax_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class TorchNet(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(3, width), torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))[:, 0]


def torch_model(options):
    return TorchNet(options.width)


def torch_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def predict(model, batch):
    return model(batch["x"])


def metrics(outputs, batch):
    return {"error": abs(outputs - batch["y"])}
'''

SQUARE = '    return ((model(batch["x"]) - batch["y"]) ** 2).mean()\n'  # both losses
OF_EACH = '(model(batch["x"]) - batch["y"]) ** 2'
READING = """
def sampler(epoch, seed, size):
    return np.random.default_rng((epoch, seed)).choice(size, 32)


def augment(example, rng):
    return {**example, "x": example["x"] + rng.standard_normal(3, np.float32)}


def collate(examples):
    return {name: np.stack([example[name] for example in examples]) for name in ("x", "y")}
"""
OWN_OPTIMIZERS = """
from jaxddp import optim


def jax_optimizer(model, total_steps):
    return optim.sgd(optim.schedules.linear(0.1, 1.0, 0.0, total_steps))


def torch_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def torch_scheduler(optimizer, total_steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)
"""


def start(folder: Path, width: int = 4) -> str:
    """Write initial weights under torch's names."""
    rng = np.random.default_rng(5)
    shapes = {"fc1.weight": (width, 3), "fc1.bias": (width,), "fc2.weight": (1, width), "fc2.bias": (1,)}
    save_file({name: rng.standard_normal(shape) for name, shape in shapes.items()}, folder / "start.safetensors")
    return str(folder / "start.safetensors")


def assert_same(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for of_one, of_other in zip(one, other, strict=True):
        assert of_one.keys() == of_other.keys()
        for name in of_one.keys() - {"kind"}:
            assert of_one[name] == pytest.approx(of_other[name], rel=LOSS_TOLERANCE), name


def write(folder: Path, *changes: Change, name: str = "run.py", more: str = "") -> Path:
    """Write the program, with replacements and further lines, into a folder."""
    text = FILE
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text + more)
    return folder / name


def in_jax(path: Path, output: Path, **flags: Any) -> list[dict[str, float]]:
    jax_trainer.run(path, output=str(output), **FLAGS | flags)
    return [record for record in records(output) if record["kind"] == "epoch"]


def in_torch(path: Path, output: Path, **flags: Any) -> list[dict[str, float]]:
    config = default_config(load_program(path), TorchTrainerConfig)
    torch_train(World(), dataclasses.replace(config, strategy="single", output=str(output), **FLAGS | flags))
    return [record for record in records(output) if record["kind"] == "epoch"]
