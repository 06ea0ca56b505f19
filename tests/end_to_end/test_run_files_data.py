"""Data of programs: read, put together, located where they are wrong, and evaluated once."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxddp import train as jax_trainer
from jaxddp.errors import TrainingError
from jaxddp.parity import check
from jaxddp.parity.workers import Workers
from jaxddp.program import default_config, load_program
from jaxddp.train import loop
from tests.support.run_files import (
    FLAGS,
    LOSS_TOLERANCE,
    OF_EACH,
    READING,
    SQUARE,
    assert_same,
    in_jax,
    in_torch,
    start,
    write,
)
from torch_ref.config import TorchTrainerConfig
from torch_ref.train import main as torch_main


def test_nan_in_arrays_in_memory_is_located(tmp_path: Path) -> None:
    path = write(tmp_path, ("return data(75, 0)", "d = data(75, 0); d['y'][7] = np.nan; return d"))
    for train in (in_jax, in_torch):
        with pytest.raises(TrainingError, match=r"^loss is nan at step 4; .*train_data\(\): example 7: y is nan; "):
            train(path, tmp_path / train.__name__)


SMALL_INTEGERS = """
class Small:
    def __init__(self): self.d = data(75, 0)
    def __len__(self): return 75
    def __getitem__(self, index): return {"x": self.d["x"][index], "y": np.uint8(3 * index)}


def train_data():
    return Small()
"""


def test_small_integers_do_not_wrap_around_in_either_trainer(tmp_path: Path) -> None:
    changes = (
        (SQUARE, SQUARE.replace('batch["y"]', '(2 * batch["y"] - 9) * batch["x"][:, 0]')),
        ("def metrics", "def no"),
    )
    path, weights = write(tmp_path, *changes, more=SMALL_INTEGERS), start(tmp_path)
    flags: dict[str, Any] = {"weights": weights, "epochs": 1, "lr": 1e-6}
    assert_same(in_jax(path, tmp_path / "jax", **flags), in_torch(path, tmp_path / "torch", **flags))


PADDED = """
def collate(examples):
    x, y = (np.stack([example[name] for example in examples]) for name in "xy")
    return {"x": x, "y": y, "padding": np.zeros((len(x), 1 + (y[0] > 0)))}
"""


def test_a_run_with_collate_counts_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of 16 examples take two lengths, and the last one has 11; of 21 tests the replicas share 20."""
    monkeypatch.setattr(loop, "MANY_SHAPES", 2)
    jax_trainer.run(write(tmp_path, more=PADDED), shuffle=False, **FLAGS)
    lines = capsys.readouterr().out.splitlines()
    assert "programs compiled, one for each shape of batch: 3 for steps, 2 for tests" in lines
    many = "shapes of batch so far, a program compiled for each; pad to fewer in `collate`"
    assert [line for line in lines if line.startswith("note:")] == [f"note: step 5: 3 {many}"]


def test_both_trainers_show_the_shards_of_a_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, more=READING)
    jax_trainer.run(path, print_shards=True, **FLAGS)
    shown = capsys.readouterr().out
    config = default_config(load_program(path), TorchTrainerConfig)
    torch_main(dataclasses.replace(config, print_shards=True, **FLAGS))
    assert capsys.readouterr().out == shown and shown.count("step") == 2


def test_the_check_reads_batches_as_both_trainers_do(tmp_path: Path, workers: Workers) -> None:
    options: dict[str, Any] = {"world_size": 2, "steps": 5, "workers": workers, "numerics": False}  # an epoch has 4
    report = check(write(tmp_path, more=READING), **options)
    assert report.verdict == "equal" and "samples" in report.stages, str(report)
    own_numbers = READING.replace("rng.standard_normal(3, np.float32)", "np.random.randn(3)")
    report = check(write(tmp_path, more=own_numbers), **options)
    assert report.verdict == "incomplete" and "returns other values at its second call" in str(report.problems)


@pytest.mark.parametrize("mean", ["loss", "metric"])
def test_each_example_of_a_test_counts_once_though_its_loss_or_metric_is_a_mean(mean: str, tmp_path: Path) -> None:
    """21 examples on 2 replicas: ten each, and one that both evaluate."""
    of_metric = (SQUARE, f"    return {OF_EACH}\n"), ('["y"])}', '["y"]).mean()}')
    path, weights = write(tmp_path, *(of_metric if mean == "metric" else ())), start(tmp_path)
    result = jax_trainer.run(path, epochs=0, weights=weights, **FLAGS)
    tensors, batch = load_file(weights), load_program(path).get("test_data")()
    hidden = np.tanh(batch["x"] @ tensors["fc1.weight"].T + tensors["fc1.bias"])
    error = (hidden @ tensors["fc2.weight"].T + tensors["fc2.bias"])[:, 0] - batch["y"]
    assert result.metrics["loss"] == pytest.approx((error**2).mean(), rel=LOSS_TOLERANCE)
    assert result.metrics["error"] == pytest.approx(abs(error).mean(), rel=LOSS_TOLERANCE)
    assert result.metrics["loss"] != pytest.approx((error[:20] ** 2).mean(), rel=1e-3)


HANGING = """
class Hanging:
    def __len__(self): return SIZE
    def __getitem__(self, index):
        import time
        time.sleep(100 * (index == 7))
        return {name: x[index] for name, x in data(SIZE, 1).items()}


def test_data():
    return Hanging()
"""


@pytest.mark.large
@pytest.mark.parametrize(
    ("size", "what"), [(21, "samples of .*'s data, for their digest"), (200, ".*'s test examples")]
)
def test_a_test_example_that_hangs_ends_the_run(size: int, what: str, tmp_path: Path) -> None:
    path = write(tmp_path, more=HANGING.replace("SIZE", f"{size}"))
    command = [sys.executable, "-m", "jaxddp.train", path, "--stall-timeout", "15"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 70 and re.match(rf"error: the reading of {what} has not ended after 15 s", ended.stderr)
