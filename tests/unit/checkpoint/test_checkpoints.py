"""Checkpoints: restored bit for bit, and only into the model and optimizer that they were saved from."""

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxddp import models, optim
from jaxddp.checkpoint import Checkpoints
from jaxddp.checkpoint.record import Record
from jaxddp.config import TrainConfig
from jaxddp.config.choices import OPTIMIZERS
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, NotFiniteError
from jaxddp.state import TrainState
from tests.support.checkpoint_states import RUN, char_mlp, check_same, save_all, state_of

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
    save_all(checkpoints, 1, 5, 10)
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


@pytest.mark.parametrize("name", ["plain name", "lr[0.1]", "back\\slash", "a*b?", "runs [x]/deeper", "naïve ünïcode"])
def test_a_checkpoint_in_a_folder_with_odd_characters_comes_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(Replicas(jax.devices()[:2]).replicate(state_of(4)))
    check_same(checkpoints.restore(state_of(0)), state_of(4))
    checkpoints.close()
    for other in ("plain", "odd [0]"):  # a run folder may be renamed
        shutil.copytree(tmp_path / name, tmp_path / other)
        moved = Checkpoints(tmp_path / other / "checkpoints")
        check_same(moved.restore(state_of(0)), state_of(4))
        moved.save(state_of(5))
        check_same(moved.restore(state_of(0)), state_of(5))
        moved.close()


@pytest.mark.parametrize(("note", "mode"), [("test_loss", "min"), ("test_accuracy", "max")])
def test_a_number_of_newest_checkpoints_and_the_best_are_kept(folder: Path, note: str, mode: str) -> None:
    sign = 1 if mode == "min" else -1
    losses = {1: 0.5, 2: 0.25, 3: 0.75, 4: None, 5: 0.5, 6: 0.25}
    losses = {step: value if value is None else sign * value for step, value in losses.items()}
    best: dict[str, Any] = {"keep_best": note == "test_loss" or note, "best_mode": mode}
    first = Checkpoints(folder, keep=1, **best)
    for step in (1, 2, 3):
        first.save(state_of(step), {note: losses[step]})
    first.close()
    assert first.steps == [2, 3]
    again = Checkpoints(folder, keep=2, **best)
    for step in (4, 5):
        again.save(state_of(step), {note: losses[step]})
    again.wait()
    assert again.steps == [2, 4, 5]
    again.save(state_of(6), {note: losses[6]})
    again.close()
    assert sorted(path.name for path in folder.iterdir()) == ["2", "5", "6"]


def test_notes_come_back_as_they_were_when_they_were_saved(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of an epoch grow while a checkpoint is written."""
    changed, write = threading.Event(), Record.write
    monkeypatch.setattr(Record, "write", lambda record, path: changed.wait(10) and write(record, path))
    sums = {"loss": 1 / 3, "count": 12.0}
    notes = {"test_loss": 0.1, "epoch_sums": sums}
    checkpoints.save(state_of(4), notes)
    sums["count"] += 1
    changed.set()
    checkpoints.restore(state_of(0))
    assert checkpoints.notes(4) == {"test_loss": 0.1, "epoch_sums": {"loss": 1 / 3, "count": 12.0}}


def with_value(state: TrainState, place: str, value: float) -> TrainState:
    """Return a state with a mask among its buffers, and this value in an array."""
    state = dataclasses.replace(state, buffers={**state.buffers, "mask": np.zeros((2, 2), np.float32)})

    def changed(path: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(path, simple=True, separator=".") == place:
            leaf = np.array(leaf)
            leaf.flat[0] = value
        return leaf

    return jax.tree_util.tree_map_with_path(changed, state)


PLATEAU = optim.reduce_on_plateau(lambda rate: optim.sgd(rate, momentum=0.9))


@pytest.mark.parametrize(
    ("place", "values"), [("buffers.mask", (-np.inf, np.inf)), ("opt_state.plateau.best", (np.inf,))]
)
def test_infinities_that_are_no_parameters_are_saved(
    place: str, values: tuple[float, ...], checkpoints: Checkpoints
) -> None:
    for step, value in enumerate(values, start=1):
        state = with_value(state_of(step, PLATEAU), place, value)
        checkpoints.save(state)
        check_same(checkpoints.restore(state), state)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("params.embedding.embedding", np.inf),
        ("opt_state.inner.1.buffer.embedding.embedding", -np.inf),
        ("buffers.mask", np.nan),
        ("opt_state.plateau.best", np.nan),
    ],
)
def test_a_parameter_must_be_finite_and_nothing_may_be_nan(place: str, value: float, checkpoints: Checkpoints) -> None:
    with pytest.raises(NotFiniteError, match=rf"^{place} is not finite at step 3$"):
        checkpoints.save(with_value(state_of(3, PLATEAU), place, value))
    assert checkpoints.steps == []
