"""`--on-nan`: a loss that is not finite ends a run of `jaxddp.train`, is skipped, or sends it back to a checkpoint."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxddp.data import datasets
from jaxddp.errors import InputError, TrainingError
from jaxddp.nn.torch_weights import load_weights
from jaxddp.train.parts import Run
from tests.support.train_runs import check_same_weights, epochs, records, train

SIZE, FEATURES = 192, 4
BAD = 100  # example whose values are NaN


@pytest.fixture(autouse=True)
def unchecked_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NaN in data pass, in place of a model that makes one."""
    monkeypatch.setattr(datasets, "_as_float32", lambda where, x: x.astype(np.float32))


def data(folder: Path, bad: int | None = BAD, value: float = np.nan) -> list[str]:
    """Write a training set in which one example is `value`; return the flags that use it, 6 steps of 32 an epoch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZE, FEATURES)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    arrays = {"x_test": x.copy(), "y_test": y}
    if bad is not None:
        x[bad] = value
    path = folder / f"{bad}.npz"
    np.savez(path, x_train=x, y_train=y, **arrays)
    flags = ["--dataset", "npz", "--data-path", str(path), "--global-batch-size", "32", "--devices", "2"]
    return [*flags, "--steps-per-dispatch", "1", "--no-shuffle", "--epochs", "2"]


def step_of(example: int) -> int:
    """Return the step of the first epoch that has an example."""
    return example // 32 + 1


STATE = {
    "plain": [],
    "average and momentum": ["--ema-decay", "0.9", "--optimizer", "sgd", "--momentum", "0.9"],
    "sharded": ["--shard-optimizer"],
    "a hook with a state": ["--comm-hook", "powerSGD", "--start-power-sgd-iter", "2"],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("flags", STATE.values(), ids=STATE)
def test_a_step_whose_loss_is_nan_is_skipped_and_counted(flags: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(*data(tmp_path), *flags, "--on-nan", "skip", "--output", str(run))
    assert [record["train_skipped"] for record in epochs(run)] == [1, 1]
    assert [record["step"] for record in records(run) if record.get("skipped")] == [step_of(BAD), 6 + step_of(BAD)]
    weights = load_weights(run / "model.safetensors")
    assert all(np.isfinite(value).all() for value in weights.values())
    assert epochs(run)[-1]["test_loss"] < epochs(run)[0]["test_loss"]
    # Without that step, the run is the same: the sampler's order without its batch.
    kept = np.load(tmp_path / f"{BAD}.npz")
    without = np.delete(np.arange(SIZE), np.s_[(step_of(BAD) - 1) * 32 : step_of(BAD) * 32])
    arrays = {name: kept[name][without] if name.endswith("train") else kept[name] for name in kept.files}
    np.savez(tmp_path / "without.npz", **arrays)
    others = [str(tmp_path / "without.npz") if word.endswith(".npz") else word for word in data(tmp_path)]
    train(*others, *flags, "--on-nan", "skip", "--output", str(tmp_path / "without"))
    check_same_weights(tmp_path / "without", run)


@pytest.mark.large
def test_skipping_changes_nothing_while_all_is_finite(tmp_path: Path) -> None:
    train(*data(tmp_path, None), "--on-nan", "skip", "--output", str(tmp_path / "skip"))
    train(*data(tmp_path, None), "--output", str(tmp_path / "stop"))
    skip, stop = (load_weights(tmp_path / name / "model.safetensors") for name in ("skip", "stop"))
    assert all(np.allclose(skip[name], stop[name], rtol=1e-5, atol=1e-7) for name in stop)


def test_a_run_goes_back_to_its_checkpoint_and_on_with_the_next_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*data(tmp_path), "--on-nan", "rollback", "--checkpoint-every", "3steps", "--output", str(tmp_path / "run")]
    train(*flags)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("loss is nan")]
    assert len(told) == 2
    for number, line in enumerate(told, 1):
        step = step_of(BAD) + 6 * (number - 1)
        pattern = rf"loss is nan at step {step}; .*; back to the checkpoint of step {step - step % 3}, on with the "
        pattern += rf"batches after step {6 * number} \({number} of at most 3 times\)"
        assert re.fullmatch(pattern, line), line
    assert all(np.isfinite(value).all() for value in load_weights(tmp_path / "run" / "model.safetensors").values())


@pytest.mark.parametrize("length", [1, 2])
def test_a_run_goes_back_if_its_state_is_not_finite_though_the_loss_is(
    length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overflow Adam's average by the square of a gradient of 1e22, which is noticed when the state is saved."""
    run = tmp_path / "run"
    flags = [*data(tmp_path, BAD, 1e22), "--on-nan", "rollback", "--checkpoint-every", "3steps"]
    train(*flags, "--epochs", f"{length}", "--output", str(run))
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "back to" in line)
    pattern = r"opt_state\..*\.nu\..* is not finite at step 6; back to the checkpoint of step 3, on with the batches "
    assert re.fullmatch(pattern + r"after step 6 \(1 of at most 3 times\)", told)
    assert all(np.isfinite(value).all() for value in load_weights(run / "model.safetensors").values())
    assert [record["step"] for record in epochs(run)] == [6, 12][:length]


def test_a_run_that_goes_back_too_often_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*data(tmp_path), "--on-nan", "rollback", "--checkpoint-every", "1steps", "--output", str(tmp_path / "run")]
    with pytest.raises(TrainingError, match=r"^loss is nan at step 22; .*; the last good checkpoint is of step 21; "):
        train(*flags, "--epochs", "9")
    assert capsys.readouterr().err.count("back to the checkpoint") == 3


def test_of_several_processes_only_the_first_says_that_the_run_goes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "is_first", False)
    train(*data(tmp_path), "--on-nan", "rollback", "--checkpoint-every", "3steps", "--output", str(tmp_path / "run"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("bad", "flags"), [(BAD, []), (0, ["--on-nan", "rollback"])], ids=["default", "rollback"])
def test_without_a_checkpoint_the_run_stops(bad: int, flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=rf"^loss is nan at step {step_of(bad)}; .*; there is no checkpoint yet$"):
        train(*data(tmp_path, bad), *flags, "--output", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on-nan", "ignore"], r"^--on-nan ignore: unknown"),
        (["--on-nan", "skip", "--amp", "fp16"], r"^--on-nan skip: the loss scaler of --amp fp16 skips such steps"),
        (["--on-nan", "skip", "--start-local-sgd-iter", "3"], r"^--on-nan skip: cannot be combined with --start-local"),
        (["--on-nan", "rollback"], r"^--on-nan rollback: goes back to a checkpoint, so it needs --output$"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(*flags)
