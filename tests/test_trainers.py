"""Both trainers print the same losses: every model with every optimizer, on the real data.

`jaxddp.train.main` and `torch_ref.train.train` themselves, on 2 devices in float64, one epoch.
The ranks of torch are started once for all twenty runs.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxddp.choices import MODELS, OPTIMIZERS
from jaxddp.config import TrainConfig
from jaxddp.train import main
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.train import train

RUNS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
# With a flag of its own each.
FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {"comm_hook": "bf16_compress"},
    "sqrt": {"lr_scaling": "sqrt"},
    "averaged": {"ema_decay": 0.9},
    "frozen": {"freeze": ("layers.0.*", "*.bias"), "weight_decay": 0.1},
}


def options(model: str, optimizer: str, output: str) -> dict:
    return {
        "model": model,
        "dataset": "names" if model == "char_mlp" else "digits",
        "hidden_sizes": (4, 8) if model == "convnet" else None,
        "optimizer": optimizer,
        "epochs": 1,
        "global_batch_size": 96,
        "devices": 2,
        "platform": "cpu",
        "dtype": "float64",
        "checkpoint_every": 0,
        "output": f"{output}/{model}-{optimizer}",
    }


def with_feature(name: str, output: str) -> dict[str, Any]:
    return options("mlp", "adam", output) | FEATURES[name] | {"output": f"{output}/{name}"}


def train_all(world: World, config: TorchConfig) -> None:
    output = str(config.output)
    for model, optimizer in RUNS:
        train(world, TorchConfig(**options(model, optimizer, output)))
    for name in FEATURES:
        train(world, TorchConfig(**with_feature(name, output)))


def losses(folder: Path) -> list[str]:
    """What the epoch lines show: 6 digits of the train and the test loss."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    shown = [[r["train_loss"], r["test_loss"], r.get("averaged_loss", 0.0)] for r in records if r["kind"] == "epoch"]
    return [" ".join(f"{loss:.6f}" for loss in of_epoch) for of_epoch in shown]


@pytest.fixture(scope="module")
def torch_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    launch(train_all, TorchConfig(devices=2, platform="cpu", output=str(folder)))
    return folder


@pytest.mark.parametrize(("model", "optimizer"), RUNS)
def test_the_same_losses_to_six_digits(model, optimizer, torch_runs, tmp_path):
    main(TrainConfig(**options(model, optimizer, str(tmp_path))))
    ours = losses(tmp_path / f"{model}-{optimizer}")
    assert len(ours) == 1 and ours == losses(torch_runs / f"{model}-{optimizer}")


@pytest.mark.parametrize("name", FEATURES)
def test_so_they_do_with_every_feature(name, torch_runs, tmp_path):
    main(TrainConfig(**with_feature(name, str(tmp_path))))
    assert losses(tmp_path / name) == losses(torch_runs / name)
    assert losses(tmp_path / name) != losses(torch_runs / "mlp-adam")  # it does something


def test_another_seed_prints_another_loss(torch_runs, tmp_path):
    """The control: six digits tell runs apart."""
    main(TrainConfig(**options("mlp", "sgd", str(tmp_path)) | {"seed": 1}))
    assert losses(tmp_path / "mlp-sgd") != losses(torch_runs / "mlp-sgd")
