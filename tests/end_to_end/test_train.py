"""`jaxddp train` from flags to files: what a run prints and writes, and how bad input ends."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxddp.config import TrainConfig
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.errors import InputError, TrainingError
from jaxddp.train import main
from jaxddp.train.build import build
from tests.support.train_runs import SMALL, epochs, losses, train


def test_the_default_run_learns_the_digits(capsys, tmp_path):
    main(TrainConfig(output=str(tmp_path / "run"), platform="cpu"))
    printed = capsys.readouterr().out.splitlines()
    accuracy = epochs(tmp_path / "run")[-1]["test_accuracy"]
    assert accuracy >= 0.97  # [0.9806; 0.975 or more for seeds 0 to 4]
    assert printed[0].startswith("mlp on digits")
    assert len([line for line in printed if line.startswith("epoch ")]) == 30
    assert f"test accuracy {accuracy:.4f}" in printed[-2] and "replicas identical" in printed[-2]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    logs = {"metrics.jsonl", "tensorboard", "curves.png"}
    assert names == {".lock", "config.json", "data.json", "model.safetensors", "checkpoints", *logs}


@pytest.mark.large
def test_a_run_in_which_every_step_overflows_stops_with_an_error(tmp_path):
    data = str(tmp_path / "data.npz")
    x, y = np.full((64, 4), 1e38, np.float32), np.zeros(64, np.int32)  # beyond float16
    np.savez(data, x_train=x, y_train=y, x_test=np.zeros_like(x), y_test=y)
    flags = ["--dataset", "npz", "--data-path", data, "--global-batch-size", "4"]
    flags += ["--amp", "fp16", "--init-scale", "1e-40"]
    with pytest.raises(TrainingError, match=r"^every step overflows: the loss scale is 0 at step"):
        train(*flags, "--epochs", "2")


def test_drifting_replicas_stop_a_run_at_the_next_verification(tmp_path, monkeypatch):
    """Plant gradients that are not averaged; steps 3, 6, ... are verified, so the error must name step 3."""

    def unsynchronized(*args, **options):
        return DistributedDataParallel(*args, **options | {"comm_hook": lambda gradients: gradients})

    monkeypatch.setattr("jaxddp.train.build.DistributedDataParallel", unsynchronized)
    flags = ["--verify-every", "3", "--steps-per-dispatch", "1", "--output", str(tmp_path / "run")]
    with pytest.raises(TrainingError, match=r"replicas differ at step 3: .* on replica 1 .*no checkpoint yet"):
        train(*flags, "--devices", "2", "--epochs", "1")


def flip_a_bit(array: jax.Array, replica: int) -> jax.Array:
    """Return the array with the lowest bit of an exponent flipped in the buffer of one replica."""
    copies = [np.array(shard.data) for shard in array.addressable_shards]
    copies[replica].view(np.uint32).flat[3] ^= 1 << 23
    shards = [jax.device_put(copy, shard.device) for copy, shard in zip(copies, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.mark.parametrize("replica", [0, 2])
def test_a_flipped_bit_is_found_named_and_repaired_if_asked(replica, tmp_path, monkeypatch, capsys):
    steps = DistributedDataParallel.steps

    def struck(self, state, batches):
        state, sums = steps(self, state, batches)
        if int(state.step) == 2:
            name = sorted(state.params)[1]
            params = state.params | {name: flip_a_bit(state.params[name], replica)}
            state = dataclasses.replace(state, params=params)
        return state, sums

    monkeypatch.setattr(DistributedDataParallel, "steps", struck)
    flags = ["--verify-every", "3", "--steps-per-dispatch", "1", "--devices", "4", "--epochs", "1"]
    with pytest.raises(TrainingError, match=rf"at step 3: .* on replica {replica} .*; replica {replica} must be wrong"):
        train(*flags)
    train(*flags, "--on-drift", "repair", "--output", str(tmp_path / "run"))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert f"; repaired from replica {1 if replica == 0 else 0}" in told[0]
    assert epochs(tmp_path / "run")[-1]["test_accuracy"] > 0.5


def test_a_guard_of_transfers_does_not_stop_the_trainer(tmp_path):
    """`JAX_TRANSFER_GUARD=disallow` in the environment."""
    with jax.transfer_guard("disallow"):
        train("--epochs", "1", "--checkpoint-every", "3steps", "--output", str(tmp_path / "run"))
    assert len(epochs(tmp_path / "run")) == 1


def test_steps_that_would_not_be_compiled_are_refused():
    with jax.disable_jit(), pytest.raises(InputError, match=r"^JAX_DISABLE_JIT is set; .*: unset it$"):
        train()


@pytest.mark.large
def test_steps_per_dispatch_changes_no_bit(tmp_path):
    """Two runs whose dispatches differ, as they do by the speed of a machine, are the same run."""
    flags = ["--dataset", "names", "--model", "char_mlp", "--buffers", "local", "--devices", "2", "--epochs", "1"]
    for count in ("1", "2"):
        train(*flags, "--steps-per-dispatch", count, "--output", str(tmp_path / count))
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == (tmp_path / "2" / "model.safetensors").read_bytes()


@pytest.mark.large
def test_steps_per_dispatch_changes_no_loss(tmp_path):
    for count in ("1", "5", "32"):
        train("--epochs", "2", "--steps-per-dispatch", count, "--output", str(tmp_path / count))
    assert losses(tmp_path / "1") == losses(tmp_path / "5") == losses(tmp_path / "32")


@pytest.mark.large
def test_a_users_own_data_trains(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(40, 3)), "x_test": rng.normal(size=(9, 3))}
    arrays |= {f"y_{part}": (arrays[f"x_{part}"][:, 0] > 0).astype(int) for part in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **arrays)
    names = ["anna", "ben", "cleo", "dora", "emil", "fritz", "gudrun", "hugo", "ida", "jonas", "karla", "leo"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    common = ["--epochs", "1", "--global-batch-size", "8"]
    train("--dataset", "npz", "--data-path", str(tmp_path / "mine.npz"), *common)
    of_names = ["--dataset", "names", "--model", "char_mlp", "--data-path", str(tmp_path / "names.txt")]
    train(*of_names, *common, "--drop-last-batch")


def test_print_shards_prints_the_table_and_stops(capsys, tmp_path):
    flags = ["--dataset", "linear", "--num-examples", "9", "--global-batch-size", "6", "--no-shuffle", "--devices", "2"]
    train(*flags, "--print-shards", "--output", str(tmp_path / "none"))
    table = capsys.readouterr().out
    assert "x1 x3 x5" in table and "x7 x9" in table and "x8 x1*" in table
    train(*flags, "--print-shards", "--drop-last")
    assert "x1*" not in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.large
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    flags = ["--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.05", "--checkpoint-every", "1"]
    train(*flags, "--epochs", "1", "--output", str(tmp_path / "run"))
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at step \d+.*last good checkpoint is of step 12"):
        train("--lr", "1e30", "--epochs", "3", "--resume", str(tmp_path / "run"))
    train("--lr", "0.05", "--epochs", "2", "--resume", str(tmp_path / "run"))
    assert len(epochs(tmp_path / "run")) == 2


REFUSALS = {
    "a batch that devices do not divide": (["--devices", "3"], r"--global-batch-size 128: .* 3 replicas .* 126 or 129"),
    "too many devices": (["--devices", "99"], r"--devices 99: "),
    "a GPU that is not there": (["--platform", "gpu"], r"--platform gpu: jax finds no GPU here"),
    "a missing file": (["--dataset", "npz", "--data-path", "none.npz"], r"none\.npz"),
    "weights of another model": (["--weights", "WEIGHTS"], r"weights do not fit the model: .*fc\.nonsense"),
    "a batch larger than the data": (
        ["--global-batch-size", "4096", "--drop-last-batch"],
        r"^--global-batch-size 4096: larger than",
    ),
    "a BatchNorm batch of one": (
        ["--model", "char_mlp", "--dataset", "names", "--global-batch-size", "2"],
        r"--global-batch-size 2: BatchNorm needs more than one value per channel .*--drop-last-batch",
    ),
    "images for a convnet": (["--model", "convnet", "--dataset", "linear"], r"--model convnet: needs images"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(what, tmp_path):
    from safetensors.numpy import save_file

    save_file({"fc.nonsense": np.zeros(3)}, tmp_path / "w.safetensors")
    flags, message = REFUSALS[what]
    flags = [str(tmp_path / "w.safetensors") if flag == "WEIGHTS" else flag for flag in flags]
    with pytest.raises(InputError, match=message) as refusal:
        train(*flags, "--output", str(tmp_path / "run"))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_bad_input_ends_the_command_with_exit_code_2_and_one_line():
    run = subprocess.run(
        [sys.executable, "-m", "jaxddp.train", "--model", "mpl"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.splitlines() == [
        "error: --model mpl: unknown; did you mean mlp? (one of linear, mlp, char_mlp, convnet)"
    ]


@pytest.mark.large
def test_the_environment_of_jax_changes_no_random_number(tmp_path):
    flags = ["--dropout", "0.5", "--epochs", "1", "--devices", "2"]
    train(*flags, "--output", str(tmp_path / "here"))
    variables = {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0", "JAX_RANDOM_SEED_OFFSET": "5"}
    command = [sys.executable, "-m", "jaxddp.train", *SMALL, *flags, "--output", str(tmp_path / "there")]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True, timeout=60)
    assert losses(tmp_path / "here") == losses(tmp_path / "there")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_NUM_CPU_DEVICES", "many", 'Invalid value "many" for JAX flag jax_num_cpu_devices'),
    ],
)
def test_a_variable_that_jax_does_not_take_is_told_in_one_line(variable, value, message):
    command = [sys.executable, "-m", "jaxddp.train", "--epochs", "1"]
    result = subprocess.run(command, env={**os.environ, variable: value}, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {variable}={value}: {message}\n"


@pytest.mark.large
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_run_with_closed_streams_trains_and_writes_nothing_into_other_files(closed, tmp_path):
    command = f"{sys.executable} -m jaxddp.train {' '.join(SMALL)} --epochs 1 --output {tmp_path}/run {closed}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "MPLBACKEND": "wrong"}
    assert subprocess.run(["sh", "-c", command], env=environment, timeout=60).returncode == 0
    assert len(epochs(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("verify_every", "steps_per_dispatch"), [(1, 1), (5, 4), (0, 11), (1000, 11)])
def test_a_dispatch_ends_at_the_next_verification_at_the_latest(verify_every, steps_per_dispatch):
    run = build(TrainConfig(platform="cpu", verify_every=verify_every, global_batch_size=128))
    assert run.loader.steps_per_epoch == 12
    assert run.loader.steps_per_dispatch == steps_per_dispatch


@pytest.mark.large
def test_a_closed_output_pipe_is_not_an_error():
    command = f"{sys.executable} -m jaxddp.train --platform cpu --epochs 3 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
