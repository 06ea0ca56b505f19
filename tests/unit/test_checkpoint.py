"""Checkpoints: restored bit for bit, and only into the model and optimizer that they were saved from."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from optax import GradientTransformation as Optimizer

from jaxddp import models, optim
from jaxddp.checkpoint import Checkpoints
from jaxddp.config import TrainConfig
from jaxddp.config.choices import OPTIMIZERS
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, TrainingError
from jaxddp.nn.functional import Functional
from jaxddp.state import TrainState

RUN = "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / RUN / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    opened = Checkpoints(folder)
    yield opened
    opened.close()


def char_mlp(hidden_size: int = 4) -> nnx.Module:
    return models.CharMLP(5, 2, 3, hidden_size, generator=Generator(0))


def state_of(step: int, optimizer: Optimizer | None = None, model: nnx.Module | None = None) -> TrainState:
    """A state in the middle of a run, in which no array has its initial value."""
    functional = Functional(model or char_mlp())
    opt_state = (optimizer or optim.adam()).init(functional.params)
    rng = np.random.default_rng(step)

    def changed(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return (leaf + rng.normal(size=leaf.shape) * 100).astype(leaf.dtype)

    params, buffers, opt_state = jax.tree.map(changed, (functional.params, functional.buffers, opt_state))
    return TrainState(np.int32(step), params, buffers, opt_state)


def check_same(restored: TrainState, expected: TrainState) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for (path, value), other in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(restored), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert value.dtype == other.dtype, name
        np.testing.assert_array_equal(other, value, name)


CONFIGS = [
    *({"optimizer": name} for name in OPTIMIZERS),
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "adam", "amsgrad": True},
    {"optimizer": "rmsprop", "momentum": 0.9, "centered": True},
    {"optimizer": "adamw", "schedule": "one_cycle"},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: " ".join(map(str, config.values())))
def test_every_optimizers_state_comes_back_bit_for_bit(
    config: dict[str, Any], checkpoints: Checkpoints, folder: Path
) -> None:
    optimizer = optim.from_config(TrainConfig(**config), total_steps=100)
    state = state_of(7, optimizer)
    checkpoints.save(state)
    check_same(checkpoints.restore(state_of(0, optimizer)), state)
    with pytest.raises(AssertionError):
        check_same(checkpoints.restore(state_of(0, optimizer)), state_of(8, optimizer))
    again = Checkpoints(folder)  # as in a process that resumes
    check_same(again.restore(state_of(0, optimizer)), state)
    again.close()


def test_float64_comes_back_bit_for_bit(checkpoints: Checkpoints) -> None:
    with jax.enable_x64(True):
        to_float64 = lambda x: x / np.float64(3) if x.dtype == "float32" else x  # noqa: E731
        state = jax.tree.map(to_float64, state_of(3))
        checkpoints.save(state)
        check_same(checkpoints.restore(state), state)


def test_a_run_resumes_on_any_number_of_devices(checkpoints: Checkpoints) -> None:
    state = state_of(3)
    checkpoints.save(Replicas(jax.devices()[:8]).replicate(state))
    two = Replicas(jax.devices()[:2]).replicate(checkpoints.restore(state_of(0)))
    check_same(jax.device_get(two), state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("other", "problems"),
    [
        ({"model": char_mlp(6)}, r"buffers\.bn\.mean has shape \(4,\) and not \(6,\); "),
        ({"model": models.Linear(4, 2, generator=Generator(0))}, r"left over buffers\.bn\.mean; .* \.\.\.$"),
        ({"optimizer": optim.sgd()}, r"left over opt_state\.1\.mu\.bn\.bias; "),
        ({"optimizer": optim.adam(amsgrad=True)}, r"missing opt_state\.1\.nu_max\.bn\.bias; "),
    ],
    ids=["wider", "another model", "another optimizer", "another option"],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    other: dict[str, Any], problems: str, checkpoints: Checkpoints
) -> None:
    checkpoints.save(state_of(3))
    message = rf"^--resume .*{RUN}: a checkpoint of another model or optimizer: {problems}"
    with pytest.raises(InputError, match=message):
        checkpoints.restore(state_of(0, **other))
    check_same(checkpoints.restore(state_of(0)), state_of(3))


def test_the_newest_two_are_kept(checkpoints: Checkpoints, folder: Path) -> None:
    for step in (1, 5, 10):
        checkpoints.save(state_of(step))
    assert checkpoints.latest_step == 10
    assert sorted(path.name for path in folder.iterdir()) == ["10", "5"]
    check_same(checkpoints.restore(state_of(0)), state_of(10))


def test_saving_a_step_again_has_no_effect(checkpoints: Checkpoints) -> None:
    checkpoints.save(state_of(4))
    checkpoints.save(TrainState(np.int32(4), *(state_of(9).params, state_of(9).buffers, state_of(9).opt_state)))
    check_same(checkpoints.restore(state_of(0)), state_of(4))


def test_restoring_without_a_checkpoint_is_an_error(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest_step is None
    with pytest.raises(InputError, match=rf"^--resume .*{RUN}: has no checkpoint yet$"):
        checkpoints.restore(state_of(0))


class Killed(BaseException):
    """Stand-in for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("renames", [0, 1])
def test_an_unfinished_checkpoint_of_a_killed_process_is_ignored(
    renames: int, checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax renames twice: first the arrays, then the step."""
    allowed, rename = [None] * renames, os.rename

    def rename_or_die(source: str, target: str) -> None:
        if not allowed:
            raise Killed
        allowed.pop()
        rename(source, target)

    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_or_die)
        with pytest.raises(Killed):
            checkpoints.save(state_of(6))
    assert [path.name for path in folder.iterdir() if "tmp" in path.name]
    resumed = Checkpoints(folder)
    assert resumed.latest_step == 5
    check_same(resumed.restore(state_of(0)), state_of(5))
    resumed.save(state_of(6))
    check_same(resumed.restore(state_of(0)), state_of(6))
    resumed.close()


def damage(kind: str, folder: Path) -> None:
    """Damage a checkpoint as a full disk, an incomplete copy or an edit may do."""
    files = [path for path in (folder / "default").rglob("*") if path.is_file()]
    metadata = folder / "default" / "_METADATA"
    if kind == "truncated":
        for path in files:
            if "d" in path.parent.parts[-1:]:
                path.write_bytes(b"")
    elif kind == "no metadata":
        metadata.unlink()
    elif kind == "other metadata":
        metadata.write_text("{")
    else:
        shutil.rmtree(folder / "default")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tensorstore's pending reads
@pytest.mark.parametrize("kind", ["truncated", "no metadata", "other metadata", "empty"])
def test_a_damaged_checkpoint_is_an_error_that_names_the_previous_one(
    kind: str, checkpoints: Checkpoints, folder: Path
) -> None:
    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    damage(kind, folder / "5")
    resumed = Checkpoints(folder)
    with pytest.raises(InputError) as caught:
        resumed.restore(state_of(0))
    message = f"--resume .*{RUN}: the checkpoint of step 5 cannot be read; remove .*/5 to continue from step 4 "
    assert re.match(message, str(caught.value))
    assert "\n" not in str(caught.value)
    resumed.close()
    shutil.rmtree(folder / "5")
    resumed = Checkpoints(folder)
    check_same(resumed.restore(state_of(0)), state_of(4))
    resumed.close()


def test_a_failed_write_is_an_error_of_one_line(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED:\n No space left on device")

    checkpoints.save(state_of(4))
    monkeypatch.setattr(ocp.CheckpointManager, "save", refuse)
    with pytest.raises(TrainingError, match=r"^the checkpoint of step 5 cannot be written: RESOURCE_EXHAUSTED: No"):
        checkpoints.save(state_of(5))
    assert checkpoints.latest_step == 4
