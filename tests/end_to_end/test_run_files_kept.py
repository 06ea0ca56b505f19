"""Programs and the run folder: what is kept, and resumed runs."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxddp import cli
from jaxddp import train as jax_trainer
from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError
from jaxddp.program import load_program
from jaxddp.tracking.kept_program import files_of, keep_program
from tests.support.run_files import LINE, LOSS_TOLERANCE, assert_same, in_jax, in_torch, start, write
from torch_ref.config import TorchTrainerConfig
from torch_ref.distributed import World
from torch_ref.train import train as torch_train


def test_a_resumed_run_is_the_uninterrupted_one_and_says_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, weights = write(tmp_path), start(tmp_path)
    expected = in_jax(path, tmp_path / "all", weights=weights, epochs=3)
    in_jax(path, tmp_path / "run", weights=weights, epochs=1)
    capsys.readouterr()
    write(tmp_path, ("class Net(", "# A comment is no change.\nclass Net("), ("Sizes.", "Of the net."))
    resumed = in_jax(path, tmp_path / "run", resume=str(tmp_path / "run"), epochs=2)
    assert "changed" not in capsys.readouterr().out
    assert_same(resumed, expected[:2])
    write(tmp_path, ("width: int = 4", "depth: int = 4"))
    with pytest.raises(InputError, match=r"config\.json: the run has width, which is no option of .*run\.py$"):
        in_jax(path, tmp_path / "run", resume=str(tmp_path / "run"))
    write(tmp_path, ("abs(outputs - batch", "2 * abs(outputs - batch"))
    resumed = in_jax(path, tmp_path / "run", resume=str(tmp_path / "run"), epochs=3)
    assert "changed since the run began: metrics in run.py\n" in capsys.readouterr().out
    assert resumed[-1]["test_loss"] == pytest.approx(expected[-1]["test_loss"], rel=LOSS_TOLERANCE)
    assert resumed[-1]["test_error"] == pytest.approx(2 * expected[-1]["test_error"], rel=LOSS_TOLERANCE)


def test_the_run_folder_keeps_the_files_and_none_is_run(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    imported = ("import jax\n", "import jax\nfrom beside import WIDTH\n")
    path = write(tmp_path, ("width: int = 4", "width: int = WIDTH"), imported)
    in_jax(path, tmp_path / "run")
    kept = tmp_path / "run" / "program"
    assert {file.name for file in kept.iterdir()} == {"run.py", "beside.py"}
    assert (kept / "run.py").read_text() == path.read_text()
    (kept / "run.py").write_text("raise SystemExit('was run')")
    in_jax(path, tmp_path / "run", resume=str(tmp_path / "run"), epochs=3)
    with pytest.raises(
        InputError, match=r"^--resume .*: is a run of run\.py; give that file too, as the first argument$"
    ):
        jax_trainer.run(resume=str(tmp_path / "run"))
    about = json.loads((tmp_path / "run" / "program.json").read_text())
    assert about["file"] == "run.py" and "Net" in about["statements"]["run.py"]
    with pytest.raises(InputError, match=r"is a run of run\.py, not of other\.py"):
        jax_trainer.run(write(tmp_path, name="other.py"), resume=str(tmp_path / "run"))


def test_a_file_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions read from there, and the flags mean the folder in which they were typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    changes = (
        ("import torch\n", "import os\n\nimport torch\n\nos.chdir('data')\n"),
        ("return data(75, 0)", "return 1 / 0"),
    )
    write(tmp_path, changes[0])
    program, config = cli.program_and_flags(["run.py", "--output", "run", "--epochs", "0"], TrainerConfig, "train")
    assert Path.cwd() == tmp_path / "data"
    assert config.output == str(tmp_path / "run") and [*files_of(program)] == ["run.py"]
    with pytest.raises(InputError, match=r"run\.py: line 31: ZeroDivisionError: division by zero$"):
        write(tmp_path, *changes)
        monkeypatch.chdir(tmp_path)
        load_program("run.py").located().get("train_data")()


STEPS = """
from jaxddp import optim


def configure_optimizers(model):
    one, other = torch.optim.SGD(model.fc1.parameters(), 0.1, 0.9), torch.optim.Adam(model.fc2.parameters(), 0.01)
    return {"fc1": one, "fc2": other, "schedule": torch.optim.lr_scheduler.MultiStepLR(one, [2, 7], 0.5)}


def torch_step(model, optimizers, batch):
    loss = torch_loss(model, batch)
    model.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss


def jax_optimizer(model):
    rate = optim.schedules.multi_step(0.1, [2, 7], 0.5)
    one, other = optim.sgd(rate, momentum=0.9), optim.adam(0.01)
    return {"fc1": nnx.Optimizer(model.fc1, one, wrt=nnx.Param), "fc2": nnx.Optimizer(model.fc2, other, wrt=nnx.Param)}


def jax_step(model, optimizers, batch):
    loss, gradients = nnx.value_and_grad(jax_loss)(model, batch)
    gradients = jax.lax.pmean(gradients, "replica")
    for name, optimizer in optimizers.items():
        optimizer.update(getattr(model, name), gradients[name])
    return loss
"""


def test_the_schedules_of_a_files_own_step_go_on_after_a_resume(tmp_path: Path) -> None:
    path = write(tmp_path, (LINE, "epochs, global_batch_size, drop_last_batch = 2, 16, True"), more=STEPS)
    weights = start(tmp_path)
    expected = in_torch(path, tmp_path / "all", weights=weights)
    assert_same(in_jax(path, tmp_path / "jax", weights=weights), expected)
    in_torch(path, tmp_path / "run", weights=weights, epochs=1)
    assert_same(in_torch(path, tmp_path / "run", weights=weights, resume=str(tmp_path / "run")), expected)


def test_a_file_of_any_encoding_is_kept(tmp_path: Path) -> None:
    text = "# coding: latin-1\nname = 'Gr\u00fc\u00dfe'\n"
    (tmp_path / "run.py").write_bytes(text.encode("latin-1"))
    keep_program(load_program(tmp_path / "run.py"), tmp_path / "kept")
    assert (tmp_path / "kept" / "program" / "run.py").read_bytes().decode("latin-1") == text


def resumed_config(path: Path, run: Path, *flags: str, trainer: type[TrainerConfig] = TrainerConfig) -> TrainerConfig:
    return cli.program_and_flags([str(path), "--resume", str(run), *flags], trainer, "train")[1]


@pytest.mark.parametrize("side", ["jax", "torch"])
def test_edited_flags_of_the_file_hold_for_a_resumed_run_as_those_of_the_command_line_do(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = TrainerConfig if side == "jax" else TorchTrainerConfig
    path, run = write(tmp_path), tmp_path / "run"
    in_side = in_jax if side == "jax" else in_torch
    in_side(path, run, epochs=1, clip_grad_norm=1.0, weights=start(tmp_path))
    assert resumed_config(path, run, trainer=trainer).clip_grad_norm == 1.0  # given for the run, and not by the file
    write(
        tmp_path,
        (LINE, LINE.replace("0.05", "0.1").replace("epochs", "clip_grad_norm, epochs").replace("2,", "9.0, 2,")),
    )
    config = resumed_config(path, run, trainer=trainer)
    assert (config.lr, config.clip_grad_norm) == (0.1, 9.0)
    assert resumed_config(path, run, "--lr", "0.3", trainer=trainer).lr == 0.3
    capsys.readouterr()
    if side == "jax":
        jax_trainer.run(path, resume=str(run), epochs=2, clip_grad_norm=2.0)
    else:
        config = resumed_config(path, run, "--epochs", "2", "--clip-grad-norm", "2.0", trainer=trainer)
        torch_train(World(), dataclasses.replace(config, output=str(run)))
    out = capsys.readouterr().out
    assert "after step 5: " in out and "--lr 0.1 instead of 0.05" in out
    assert resumed_config(path, run, trainer=trainer).clip_grad_norm == 2.0  # not edited since
    write(tmp_path, (LINE, LINE.replace("2, 16", "2, 32")))
    with pytest.raises(InputError) as caught:
        resumed_config(path, run, trainer=trainer)
    assert str(caught.value) == (
        f"{path}: global_batch_size 32: the run in {run} must continue with global_batch_size 16"
    )
    assert resumed_config(path, run, "--global-batch-size", "16", trainer=trainer).lr == 0.05
    with pytest.raises(InputError, match=r"^--seed 1: the run in .* must continue with --seed 0$"):
        resumed_config(path, run, "--global-batch-size", "16", "--seed", "1", trainer=trainer)


def test_edited_options_of_the_file_hold_too(tmp_path: Path) -> None:
    path = write(tmp_path, ("width: int = 4\n", "width: int = 4\n    noise: float = 0.5\n"))
    in_jax(path, tmp_path / "run", epochs=1)
    write(tmp_path, ("width: int = 4\n", "width: int = 4\n    noise: float = 0.25\n"))
    assert resumed_config(path, tmp_path / "run").noise == 0.25
    assert resumed_config(path, tmp_path / "run", "--noise", "1.0").noise == 1.0
