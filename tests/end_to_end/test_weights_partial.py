"""`--weights-partial`: what fits is loaded, and one line lists what was left out on both sides, in both trainers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxddp import train as jax_trainer
from jaxddp.errors import InputError
from tests.support.run_files import FLAGS, assert_same, in_jax, in_torch, start, write
from tests.support.train_runs import epochs

RUNS = pytest.mark.parametrize("train", [in_jax, in_torch])


def other_head(folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Write weights of a model with another head, and one tensor more."""
    tensors = load_file(start(folder))
    tensors |= {"fc2.weight": np.ones((5, 4)), "old.bias": np.ones(3)}
    del tensors["fc2.bias"]
    save_file(tensors, folder / "other.safetensors")
    return str(folder / "other.safetensors"), tensors


LEFT_OUT = "fc2.weight has shape (5, 4) and not (1, 4); left over old.bias; missing fc2.bias"


@RUNS
@pytest.mark.parametrize("frozen", [(), ("fc1.*",)])
def test_what_fits_is_loaded_and_the_rest_is_listed(
    train: Callable[..., Any], frozen: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (weights, tensors) = write(tmp_path), other_head(tmp_path)
    train(path, tmp_path / "run", weights_partial=weights, epochs=1 if frozen else 0, freeze=frozen)
    assert f"--weights-partial {weights}: loads 2 of the model's 4 tensors; {LEFT_OUT}\n" in capsys.readouterr().out
    train(path, tmp_path / "own", epochs=0)
    saved, own = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "own"))
    assert all(np.array_equal(saved[name], tensors[name]) for name in ("fc1.weight", "fc1.bias"))
    assert frozen or all(np.array_equal(saved[name], own[name]) for name in ("fc2.weight", "fc2.bias"))


@RUNS
def test_a_file_of_which_nothing_fits_is_refused(train: Callable[..., Any], tmp_path: Path) -> None:
    path, weights = write(tmp_path), str(tmp_path / "nothing.safetensors")
    save_file({"a": np.ones(1)}, weights)
    with pytest.raises(InputError, match=rf"^--weights-partial {weights}: nothing in it fits the model: left over a; "):
        train(path, tmp_path / "run", weights_partial=weights)
    with pytest.raises(InputError, match=r"^--weights-partial .*: cannot be combined with --weights$"):
        train(path, tmp_path / "run", weights_partial=weights, weights=weights)


@RUNS
def test_weights_stays_strict(train: Callable[..., Any], tmp_path: Path) -> None:
    path, (weights, _) = write(tmp_path), other_head(tmp_path)
    with pytest.raises(InputError, match=rf"^--weights {weights}: .*missing fc2.bias"):
        train(path, tmp_path / "run", weights=weights)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path, (weights, tensors) = write(tmp_path), other_head(tmp_path)
    tensors["fc1.bias"][1] = np.nan
    save_file(tensors, weights)
    renamed = write(tmp_path, *RENAMED, more='names = {"hidden": "fc1"}\n', name="renamed.py")
    for train, file in ((in_jax, path), (in_torch, path), (in_jax, renamed)):
        with pytest.raises(InputError, match=rf"^--weights-partial {weights}: fc1.bias\[1\] is nan; must be finite"):
            train(file, tmp_path / "run", weights_partial=weights)


RENAMED = (("self.fc1 = nnx", "self.hidden = nnx"), ("nnx.tanh(self.fc1(x))", "nnx.tanh(self.hidden(x))"))


def test_weights_of_the_torch_twin_are_loaded_by_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, (weights, tensors) = write(tmp_path, *RENAMED, more='names = {"hidden": "fc1"}\n'), other_head(tmp_path)
    result = jax_trainer.run(path, epochs=0, weights_partial=weights, **FLAGS)
    assert f"loads 2 of the model's 4 tensors; {LEFT_OUT}\n" in capsys.readouterr().out
    assert np.array_equal(result.weights["hidden.kernel"], tensors["fc1.weight"].T)
    own = tmp_path / "own.safetensors"
    save_file({"hidden.kernel": result.weights["hidden.kernel"] + 1, "hidden.bias": np.ones(4), "x": np.ones(2)}, own)
    again = jax_trainer.run(path, epochs=0, weights_partial=own, **FLAGS)
    assert np.array_equal(again.weights["hidden.kernel"], result.weights["hidden.kernel"] + 1)
    assert "loads 2 of the model's 4 tensors; left over x; missing fc2.bias; missing fc2.kernel\n" in (
        capsys.readouterr().out
    )


def test_a_resumed_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    path, (weights, _) = write(tmp_path), other_head(tmp_path)
    whole = in_jax(path, tmp_path / "whole", weights_partial=weights, epochs=2)
    in_jax(path, tmp_path / "parts", weights_partial=weights, epochs=1)
    jax_trainer.run(path, resume=str(tmp_path / "parts"), epochs=2)
    assert_same(epochs(tmp_path / "parts"), whole)
