"""Runs of `jaxddp.train` on small models, and the losses that they log."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.nn.torch_weights import load_weights
from jaxddp.train import main

SMALL = ["--platform", "cpu", "--hidden-sizes", "16", "--global-batch-size", "128", "--lr", "0.01"]
ROUNDING = 1e-5  # of the largest parameter; measured: 0 to 2e-7


def train(*flags: str) -> None:
    """Train with these flags, in this process."""
    main(cli.parse(TrainConfig, [*SMALL, *flags], "train"))


def train_whole_and_in_parts(folder: Path, *flags: str, first: int, then: int) -> None:
    """Train until an epoch in folder/whole, and in two runs in folder/parts; check that both are equal bit for bit."""
    whole, parts = folder / "whole", folder / "parts"
    train(*flags, "--epochs", f"{then}", "--output", f"{whole}")
    train(*flags, "--epochs", f"{first}", "--output", f"{parts}")
    train("--epochs", f"{then}", "--resume", f"{parts}")
    assert losses(parts) == losses(whole)
    check_same_weights(whole, parts)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all records of a run, without the speed."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "examples_per_second"} for line in lines]


def epochs(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's epochs."""
    return [record for record in records(folder) if record["kind"] == "epoch"]


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return sorted(int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal())


def losses(folder: Path) -> list[tuple[float, float]]:
    """Return the training and the test loss of each epoch."""
    return [(record["train_loss"], record["test_loss"]) for record in epochs(folder)]


def check_same_weights(first: Path, second: Path) -> None:
    """Check that two runs have written the same files of weights, bit for bit."""
    for path in first.glob("*.safetensors"):
        one, other = load_weights(path), load_weights(second / path.name)
        assert all(np.array_equal(one[name], other[name]) for name in one), path.name


def check_close_weights(first: Path, second: Path) -> None:
    """Check that two runs, of other layouts, have the same weights but for rounding in float32."""
    one, other = (load_weights(folder / "model.safetensors") for folder in (first, second))
    largest = max(np.abs(value).max() for value in other.values())
    for name, value in other.items():
        np.testing.assert_allclose(one[name], value, rtol=0, atol=ROUNDING * largest, err_msg=name)
