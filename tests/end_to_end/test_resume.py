"""Resuming a run of `jaxddp.train`: bit for bit, after a crash, and never with options that change the run."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.errors import InputError, TrainingError
from jaxddp.tracking.run_folder import claim_output
from jaxddp.train import main
from tests.support.train_runs import SMALL, check_same_weights, epochs, losses, train, train_whole_and_in_parts
from torch_ref.config import TorchConfig
from torch_ref.train import main as torch_main

STATEFUL = ["--ema-decay", "0.9", "--dropout", "0.3"]


@pytest.mark.large
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(optimizer, tmp_path):
    flags = ["--optimizer", optimizer, "--schedule", "step", "--step-size", "7", *STATEFUL]
    train_whole_and_in_parts(tmp_path, *flags, first=2, then=4)


@pytest.mark.large
def test_a_resumed_run_restores_its_loss_scale(tmp_path):
    flags = ["--amp", "fp16", "--init-scale", "1e12", "--growth-interval", "5", "--schedule", "step"]
    flags += ["--step-size", "7"]
    train_whole_and_in_parts(tmp_path, *flags, first=2, then=3)
    assert epochs(tmp_path / "whole")[0]["train_skipped"] > 5
    with pytest.raises(InputError, match=r"--amp none: the run in .* must continue with --amp fp16"):
        train("--epochs", "4", "--amp", "none", "--resume", str(tmp_path / "parts"))


@pytest.mark.large
def test_local_buffers_are_resumed_bit_for_bit_and_only_by_as_many_replicas(tmp_path):
    flags = ["--dataset", "names", "--model", "char_mlp", "--buffers", "local", "--devices", "2"]
    train_whole_and_in_parts(tmp_path, *flags, first=1, then=2)
    message = r"--devices 4: the run in .* has separate buffers for 2 replicas; must be 2"
    with pytest.raises(InputError, match=message):
        train("--epochs", "3", "--devices", "4", "--resume", str(tmp_path / "parts"))


@pytest.mark.large
def test_a_resumed_run_without_its_optimizer_state_is_caught(tmp_path):
    """Starting again from the weights alone gives other losses."""
    train("--epochs", "2", "--output", str(tmp_path / "first"))
    weights = str(tmp_path / "first" / "model.safetensors")
    train("--epochs", "4", "--output", str(tmp_path / "whole"))
    train("--epochs", "2", "--output", str(tmp_path / "forgot"), "--weights", weights)
    assert losses(tmp_path / "forgot")[0] != losses(tmp_path / "whole")[2]


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path):
    """After SIGKILL between two checkpoints, the epochs since the last checkpoint are repeated."""
    folder = tmp_path / "run"
    flags = [*SMALL, *STATEFUL, "--devices", "2", "--epochs", "4000", "--checkpoint-every", "3"]
    command = [sys.executable, "-m", "jaxddp.train", *flags, "--output", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        number = int(line.split()[1].split("/")[0]) if line.startswith("epoch") else 0
        if number > 6 and number % 3 == 1:  # the checkpoint of epoch 3 is complete before that of epoch 6 begins
            break
    process.kill()
    process.communicate()
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    goal = str(saved // 12 + 2)  # 12 steps an epoch
    assert len(epochs(folder)) >= saved // 12
    main(cli.parse(TrainConfig, ["--resume", str(folder), "--epochs", goal], "train"))
    train(*STATEFUL, "--epochs", goal, "--output", str(tmp_path / "whole"), "--devices", "2")
    assert losses(folder) == losses(tmp_path / "whole")
    check_same_weights(tmp_path / "whole", folder)


@pytest.mark.large
def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path):
    with pytest.raises(TrainingError, match="there is no checkpoint yet"):
        train("--lr", "1e30", "--epochs", "3", "--output", str(tmp_path / "run"))
    train("--lr", "0.01", "--epochs", "2", "--resume", str(tmp_path / "run"))
    train("--epochs", "2", "--output", str(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.large
def test_a_run_that_ended_before_its_first_checkpoint_starts_again_from_its_given_weights(tmp_path, monkeypatch):
    train("--seed", "7", "--epochs", "0", "--output", str(tmp_path / "given"))
    monkeypatch.chdir(tmp_path / "given")
    flags = ["--weights", "model.safetensors", "--epochs", "2"]
    with pytest.raises(TrainingError, match="there is no checkpoint yet"):
        train(*flags, "--lr", "1e30", "--output", str(tmp_path / "run"))
    train(*flags, "--output", str(tmp_path / "whole"))
    monkeypatch.chdir(tmp_path)  # the relative path of --weights does not exist here
    train("--resume", str(tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    train("--epochs", "2", "--output", str(tmp_path / "other"))
    assert losses(tmp_path / "other") != losses(tmp_path / "whole")


@pytest.mark.large
def test_resuming_is_refused_if_other_devices_change_the_steps_per_epoch(tmp_path):
    flags = ["--dataset", "linear", "--num-examples", "65", "--global-batch-size", "32", "--drop-last-batch"]
    train(*flags, "--devices", "8", "--drop-last", "--epochs", "1", "--output", str(tmp_path / "run"))
    train("--resume", str(tmp_path / "run"), "--global-batch-size", "32", "--devices", "2", "--epochs", "2")
    flags = ["--dataset", "linear", "--num-examples", "63", "--global-batch-size", "32", "--drop-last-batch"]
    train(*flags, "--devices", "2", "--epochs", "1", "--output", str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"^--resume .*other: its epochs had 2 steps and would now have 1; "):
        train("--resume", str(tmp_path / "other"), "--global-batch-size", "32", "--devices", "1", "--epochs", "2")


@pytest.mark.parametrize("trainer", [main, torch_main])
def test_a_run_folder_in_use_is_neither_overwritten_nor_resumed(trainer, tmp_path):
    config_class = TrainConfig if trainer is main else TorchConfig
    with claim_output(tmp_path / "run"):
        flags = [*SMALL, "--devices", "1", "--epochs", "1", "--output", f"{tmp_path}/run"]
        with pytest.raises(InputError, match=r"^--output .*run: in use by process \d+ on "):
            trainer(cli.parse(config_class, flags, "train"))
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    trainer(cli.parse(config_class, flags, "train"))
    with (
        claim_output(tmp_path / "run", resume=True),
        pytest.raises(InputError, match=r"^--resume .*run: in use by process \d+ on "),
    ):
        trainer(cli.parse(config_class, ["--resume", f"{tmp_path}/run", "--epochs", "2"], "train"))
    assert len(epochs(tmp_path / "run")) == 1


def test_a_run_folder_is_not_overwritten_or_resumed_with_other_options(tmp_path):
    train("--epochs", "0", "--output", str(tmp_path / "run"))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"--output .*run: already holds a run"):
        train("--epochs", "0", "--output", str(tmp_path / "run"))
    for flags, message in {
        ("--model", "linear"): "--model linear: the run in .* must continue with --model mlp",
        ("--optimizer", "sgd"): "--optimizer sgd: the run in .* must continue with --optimizer adam",
        ("--seed", "3"): "--seed 3: the run in .* must continue with --seed 0",
    }.items():
        with pytest.raises(InputError, match=message):
            main(cli.parse(TrainConfig, ["--resume", str(tmp_path / "run"), *flags, "--epochs", "2"], "train"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("trainer", [main, torch_main])
def test_a_run_resumes_with_its_data_and_checkpoints_and_no_others_and_tells_what_changes(trainer, tmp_path, capsys):
    config_class = TrainConfig if trainer is main else TorchConfig
    x = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)

    def save(name, x_train, x_test=x):
        y_train, y_test = ((x[:, 0] > 0).astype(int) for x in (x_train, x_test))
        np.savez(tmp_path / name, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)

    def run(*flags):
        trainer(cli.parse(config_class, [*SMALL, "--devices", "1", *flags], "train"))

    save("mine.npz", x)
    data = ["--dataset", "npz", "--data-path"]
    run(*data, str(tmp_path / "mine.npz"), "--epochs", "1", "--output", f"{tmp_path}/run")
    resume = ["--epochs", "2", "--resume", f"{tmp_path}/run"]
    save("other.npz", x, x_test=2 * x)
    with pytest.raises(InputError, match=r"^--resume .*run: the test data are not those that the run started with; "):
        run(*resume, "--data-path", str(tmp_path / "other.npz"))
    before = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "mine.npz").rename(tmp_path / "moved.npz")
    for other in (np.nextafter(x, 9, dtype=np.float32), x[:128]):
        save("mine.npz", other)
        with pytest.raises(InputError, match=r"^--resume .*run: the training data are not those"):
            run(*resume)
    assert (tmp_path / "run" / "config.json").read_text() == before
    capsys.readouterr()
    run(*resume, "--data-path", str(tmp_path / "moved.npz"), "--lr", "0.02", "--log-every", "2")
    assert capsys.readouterr().out.splitlines()[1] == "after step 2: --lr 0.02 instead of 0.01"
    assert len(epochs(tmp_path / "run")) == 2
    run(*data, str(tmp_path / "moved.npz"), "--epochs", "1", "--seed", "1", "--output", f"{tmp_path}/other")
    for saved in (path for path in (tmp_path / "other").iterdir() if path.name.startswith("checkpoint")):
        shutil.rmtree(tmp_path / "run" / saved.name, ignore_errors=True)
        saved.replace(tmp_path / "run" / saved.name)
    message = r"^--resume .*run: the checkpoint of step 2 is of another run, with --seed 1 and not --seed 0$"
    with pytest.raises(InputError, match=message):
        run(*resume)


@pytest.mark.large
@pytest.mark.parametrize("module", ["jaxddp.train", "torch_ref.train"])
def test_of_two_commands_that_start_at_once_one_trains_and_the_other_is_refused(module, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", module, *SMALL, "--devices", "1", "--epochs", "3", "--output", str(folder)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [(run.communicate(), run.returncode) for run in runs]
    (_, won), ((_, told), lost) = sorted(results, key=lambda result: result[1])
    assert (won, lost) == (0, 2)
    assert re.fullmatch(rf"error: --output {folder}: (in use by .*|already holds a run; .*)\n", told)
    assert [record["epoch"] for record in epochs(folder)] == [1, 2, 3]
