"""What follows from a test during a run, in both trainers: rates, averages, early stops, on_epoch_end; also resumed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxddp import train as jax_trainer
from jaxddp.config import TrainConfig
from jaxddp.config.config import TrainerConfig
from jaxddp.config.hardware import GPUS
from jaxddp.errors import InputError
from jaxddp.program import config_class, load_program
from jaxddp.tracking import run_log
from jaxddp.train import parts
from tests.support.run_files import FILE
from tests.support.train_runs import epochs, records, saved_steps
from torch_ref.config import TorchConfig, TorchTrainerConfig
from torch_ref.train import main as torch_main


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "draw_curves", lambda history, title: b"")


SMALL: dict[str, Any] = {"hidden_sizes": (8,), "global_batch_size": 480, "platform": "cpu", "devices": 1}
SMALL |= {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9, "checkpoint_every": 1}


def run(trainer: str, folder: Path, **flags: Any) -> Path:
    """Run a trainer in this process, and return its folder."""
    flags = SMALL | {"output" if "resume" not in flags else "resume": str(folder)} | flags
    if trainer == "jax":
        jax_trainer.main(TrainConfig(**flags))
    else:
        torch_main(TorchConfig(strategy="single", **flags))
    return folder


LATE: dict[str, dict[str, Any]] = {
    "plateau": {"schedule": "plateau", "patience": 0, "threshold": 0.5, "factor": 0.1, "lr": 0.5},
    "swa": {"swa_start": 1, "swa_lr": 0.01, "anneal_epochs": 2},
    "stopping": {"early_stopping_patience": 3, "best_metric": "accuracy", "best_mode": "min"},
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("trainer", ["jax", "torch"])
@pytest.mark.parametrize("name", LATE)
def test_a_resumed_run_goes_on_with_its_rate_average_and_count(name: str, trainer: str, tmp_path: Path) -> None:
    whole = run(trainer, tmp_path / "whole", epochs=5, **LATE[name])
    parts = run(trainer, tmp_path / "parts", epochs=2 + (name == "swa"), **LATE[name])
    run(trainer, parts, epochs=5, resume=str(parts), **LATE[name])
    assert records(parts) == records(whole)
    assert len(epochs(whole)) == (4 if name == "stopping" else 5)  # the first accuracy is the least
    if name == "swa":
        averaged, last = (load_file(whole / f"model{end}.safetensors") for end in ("_averaged", ""))
        assert averaged.keys() == last.keys()
        assert any(not np.array_equal(averaged[n], last[n]) for n in last)
        assert [("averaged_loss" in record) for record in epochs(whole)] == [False] + 4 * [True]


@pytest.mark.large
def test_a_plateau_lowers_the_rate_that_follows(tmp_path: Path) -> None:
    losses = []
    for threshold in (0.0, 0.99):
        folder = run("jax", tmp_path / f"{threshold}", epochs=3, **LATE["plateau"] | {"threshold": threshold})
        losses.append([record["train_loss"] for record in epochs(folder)])
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]


@pytest.mark.large
def test_the_best_checkpoint_by_a_metric_stays(tmp_path: Path) -> None:
    flags = {"keep_best": True, "keep_checkpoints": 1, "best_metric": "accuracy", "best_mode": "max"}
    folder = run("jax", tmp_path / "run", epochs=6, **flags | {"lr": 1.5})
    best = max(epochs(folder), key=lambda record: (record["test_accuracy"], -record["step"]))
    assert saved_steps(folder) == sorted({best["step"], epochs(folder)[-1]["step"]})


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_the_best_weights_are_saved_and_a_resumed_run_keeps_them(trainer: str, tmp_path: Path) -> None:
    """The largest loss is that of the first epoch, and the smallest that of the last."""
    flags = {"keep_best": True} | ({"keep_checkpoints": 1} if trainer == "jax" else {})
    folder = run(trainer, tmp_path / "run", epochs=2, best_mode="max", **flags)
    run(trainer, folder, epochs=3, resume=str(folder), best_mode="max", **flags)
    losses = [record["test_loss"] for record in epochs(folder)]
    assert max(losses) == losses[0]
    first = run(trainer, tmp_path / "first", epochs=1, **flags)
    expected = load_file(first / "model.safetensors")
    for path in (folder / "model_best.safetensors", first / "model_best.safetensors"):
        assert all(np.array_equal(expected[name], array) for name, array in load_file(path).items())
    last = load_file(folder / "model.safetensors")
    assert last.keys() == expected.keys() and any(not np.array_equal(last[name], expected[name]) for name in last)
    assert not list(run(trainer, tmp_path / "none", epochs=1).glob("model_best*"))


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_a_metric_that_the_test_lacks_is_told_before_the_first_step(trainer: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--best-metric acuracy: not a metric of the test \(one of loss, accuracy\)"):
        run(trainer, tmp_path / "run", epochs=2, early_stopping_patience=1, best_metric="acuracy")
    assert records(tmp_path / "run") == []


@pytest.mark.one_in(2, first=1)
@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_tests_every_k_steps_come_after_these_steps(trainer: str, tmp_path: Path) -> None:
    folder = run(trainer, tmp_path / "run", epochs=3, global_batch_size=160, evaluate_every="6steps")
    found = [(record["kind"], record["step"], "test_loss" in record) for record in records(folder)]
    within = [("test", 6, True), ("epoch", 9, False), ("test", 12, True), ("epoch", 18, True), ("test", 24, True)]
    assert [one for one in found if one[0] != "step"] == [*within, ("epoch", 27, True)]
    rare = run(trainer, tmp_path / "rare", epochs=3, evaluate_every=2)
    assert [("test_loss" in record) for record in epochs(rare)] == [False, True, True]


def test_the_last_lines_say_what_a_known_gpu_reaches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU stands in for the GPU."""
    gpu = dataclasses.replace(GPUS["h100"], name="cpu", peak={"f32": 1e9})
    monkeypatch.setattr(parts, "GPUS", {"cpu": gpu})
    monkeypatch.setattr(parts, "most_memory", lambda devices, statistic: 2_500_000_000)
    flags = {"model": "linear", "platform": "cpu", "devices": 2, "epochs": 2}
    jax_trainer.main(TrainConfig(**flags))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "per device" in line]
    rate = float(line.split(" examples/s")[0].replace(",", ""))
    # Forward and backward for the weights of 64 x 10; each of two devices has half of the examples.
    share = 2 * 2 * 64 * 10 * rate / 2 / 1e9
    assert line.split("   ")[1:3] == ["2.50 GB per device", f"{share:.1%} of the f32 peak"]


TOLD = """
epochs = 4
calls = []


def on_epoch_end(epoch, step, metrics, weights):
    calls.append((epoch, step, sorted(metrics), sorted(weights)))
    return "stop" if epoch == 2 else None
"""


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_on_epoch_end_sees_metrics_and_weights_and_may_end_the_run(
    trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.py"
    path.write_text(FILE.replace("epochs, global_batch_size", "_, global_batch_size") + TOLD)
    program = load_program(str(path))
    flags = {"platform": "cpu", "devices": 1}
    if trainer == "jax":
        jax_trainer.main(config_class(program, TrainerConfig)(**program.defaults | flags), program)
    else:
        torch_main(config_class(program, TorchTrainerConfig)(**program.defaults | flags, strategy="single"))
    names = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    calls = program.values["on_epoch_end"].__globals__["calls"]
    assert [(epoch, step) for epoch, step, *_ in calls] == [(1, 5), (2, 10)]
    assert {"test_loss", "train_loss"} <= set(calls[0][2]) and calls[0][3] == names
    assert "stopped by on_epoch_end" in capsys.readouterr().out
