"""Checkpoints: restored bit for bit, and only into the model and optimizer that they were saved from."""

import contextlib
import os
import re
import shutil
import threading
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
from jaxddp.checkpoint.record import RecordHandler
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
    checkpoints.wait()
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
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_or_die)
        checkpoints.save(state_of(6))
        with pytest.raises(Killed):
            checkpoints.wait()
    assert [path.name for path in folder.iterdir() if "tmp" in path.name]
    resumed = Checkpoints(folder)
    assert resumed.latest_step == 5
    check_same(resumed.restore(state_of(0)), state_of(5))
    resumed.save(state_of(6))
    check_same(resumed.restore(state_of(0)), state_of(6))
    assert sorted(path.name for path in folder.iterdir()) == ["5", "6"]
    resumed.close()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(file: Path, byte: int, bit: int) -> None:
    """Flip a bit of a file, as memory or a disk may do."""
    content = bytearray(file.read_bytes())
    content[byte % len(content)] ^= 1 << bit
    file.write_bytes(content)


def damage(kind: str, folder: Path) -> None:
    """Damage a checkpoint as a full disk, an incomplete copy or an edit may do."""
    metadata = folder / "state" / "_METADATA"
    if kind == "truncated":
        for path in files_of(folder / "state"):
            if "d" in path.parent.parts[-1:]:
                path.write_bytes(b"")
    elif kind == "no metadata":
        metadata.unlink()
    elif kind == "other metadata":
        metadata.write_text("{")
    elif kind == "no record":
        (folder / "record" / "record.json").unlink()
    elif kind == "other record":
        (folder / "record" / "record.json").write_text("[" * 100_000)
    elif kind == "empty":
        shutil.rmtree(folder / "state")
    else:
        shutil.rmtree(folder / "state")
        shutil.copytree(folder.parent / "4" / "state", folder / "state")


DAMAGES = ["truncated", "no metadata", "other metadata", "no record", "other record", "empty", "arrays of another step"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tensorstore's pending reads
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    kind: str, checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    checkpoints.wait()
    damage(kind, folder / "5")
    resumed = Checkpoints(folder)
    assert resumed.newest_intact() == 4
    check_same(resumed.restore(state_of(0)), state_of(4))
    line = r"the checkpoint of step 5 is damaged \(.+\); continuing from step 4\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    resumed.save(state_of(5))  # its step can be saved again
    check_same(resumed.restore(state_of(0)), state_of(5))
    assert sorted(path.name for path in folder.iterdir()) == ["4", "5", "5.damaged"]
    resumed.close()
    with contextlib.closing(Checkpoints(folder)) as again:
        assert again.steps == [4, 5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_flipped_bit_in_any_file_is_noticed_or_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Orbax's data files have no checksum of the values: without the record, half of these came back changed."""
    run = tmp_path / RUN
    saved = Checkpoints(run)
    saved.save(state_of(4))
    saved.save(state_of(5))
    saved.close()
    files, rng, noticed = files_of(run / "5"), np.random.default_rng(0), 0
    for number, file in enumerate([*files, *files]):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        flip(copy / file.relative_to(run), int(rng.integers(2**20)), int(rng.integers(8)))
        with contextlib.closing(Checkpoints(copy)) as resumed:
            restored = resumed.restore(state_of(0))
        check_same(restored, state_of(int(restored.step)))
        told = re.fullmatch(r"the checkpoint of step 5 is damaged \(.+\); .* 4\n", capsys.readouterr().err) is not None
        assert told == (int(restored.step) == 4)
        noticed += told
    assert noticed >= len(files) // 2  # [8 of 26; most bits of the small files mean nothing]


def test_a_flipped_bit_names_the_array(
    checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    checkpoints.wait()
    restore = ocp.CheckpointManager.restore

    def flipped(manager: Any, step: int, **options: Any) -> Any:
        restored = restore(manager, step, **options)
        if step == 5:
            restored["state"]["params"]["bn.scale"].view(np.uint32)[2] ^= 1
        return restored

    monkeypatch.setattr(ocp.CheckpointManager, "restore", flipped)
    check_same(checkpoints.restore(state_of(0)), state_of(4))
    expected = "the checkpoint of step 5 is damaged (params.bn.scale); continuing from step 4\n"
    assert capsys.readouterr().err == expected


def test_without_an_intact_checkpoint_each_is_named(checkpoints: Checkpoints, folder: Path) -> None:
    for step in (4, 5):
        checkpoints.save(state_of(step))
    checkpoints.wait()
    for step in (4, 5):
        damage("no record", folder / str(step))
    with pytest.raises(InputError) as caught:
        checkpoints.restore(state_of(0))
    each = [f"the checkpoint of step {step} is damaged (record.json is missing)" for step in (5, 4)]
    assert str(caught.value) == f"--resume {folder.parent}: {'; '.join(each)}; there is no intact one"
    assert checkpoints.newest_intact() is None
    assert checkpoints.steps == [4, 5]  # nothing was renamed


def test_a_checkpoint_of_a_newer_jaxddp_is_refused(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(state_of(4))
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr("jaxddp.checkpoint.record.FORMAT", 2)
        checkpoints.save(state_of(5))
        checkpoints.wait()
    with pytest.raises(InputError) as caught:
        checkpoints.restore(state_of(0))
    message = "the checkpoint of step 5 has format 2, and this jaxddp reads up to 1; update jaxddp"
    assert str(caught.value) == f"--resume {folder.parent}: {message}"
    assert checkpoints.steps == [4, 5]


@pytest.mark.parametrize("name", ["lr[0.1]", "back\\slash", "a*b?", "runs [x]/deeper", "naïve ünïcode"])
def test_a_checkpoint_in_a_folder_with_odd_characters_comes_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(state_of(4))
    check_same(checkpoints.restore(state_of(0)), state_of(4))
    checkpoints.close()
    for other in ("plain", "odd [0]"):  # a run folder may be renamed
        shutil.copytree(tmp_path / name, tmp_path / other)
        moved = Checkpoints(tmp_path / other / "checkpoints")
        check_same(moved.restore(state_of(0)), state_of(4))
        moved.save(state_of(5))
        check_same(moved.restore(state_of(0)), state_of(5))
        moved.close()


def test_a_folder_of_a_plain_name_can_be_renamed_to_an_odd_one(checkpoints: Checkpoints, folder: Path) -> None:
    checkpoints.save(Replicas(jax.devices()[:2]).replicate(state_of(4)))
    checkpoints.wait()
    folder.parent.rename(folder.parent.with_name("odd [0]"))
    moved = Checkpoints(folder.parent.with_name("odd [0]") / "checkpoints")
    check_same(moved.restore(state_of(0)), state_of(4))
    moved.close()


def test_the_saved_values_are_those_of_the_step_though_the_next_ones_reuse_their_memory(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps donate the state, whose memory NumPy views share on CPU."""
    overwritten = hold_writes(monkeypatch)
    replicas = Replicas(jax.devices()[:2])
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    state = replicas.replicate(state_of(4))
    checkpoints.save(state)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    overwritten.set()
    check_same(checkpoints.restore(state_of(0)), state_of(4))


def test_a_save_has_its_own_copy_of_numpy_arrays(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    overwritten, state = hold_writes(monkeypatch), state_of(4)
    checkpoints.save(state)
    for leaf in state.params.values():
        leaf += 1
    overwritten.set()
    check_same(checkpoints.restore(state_of(0)), state_of(4))


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no save end before the event is set, and no array be written."""
    event = threading.Event()
    write = RecordHandler.save

    def late(handler: RecordHandler, directory: Any, args: Any) -> None:
        assert event.wait(60)
        write(handler, directory, args)

    monkeypatch.setattr(RecordHandler, "save", late)
    return event


def test_a_failed_write_is_told_at_the_next_save_and_earlier_checkpoints_stay(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED:\n No space left on device")

    checkpoints.save(state_of(4))
    checkpoints.save(state_of(5))
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(RecordHandler, "save", refuse)
        checkpoints.save(state_of(6))
        with pytest.raises(TrainingError, match=r"^the checkpoint of step 6 cannot be written: RESOURCE_EXHAUSTED: No"):
            checkpoints.save(state_of(7))
    assert checkpoints.steps == [4, 5]
    checkpoints.save(state_of(7))
    check_same(checkpoints.restore(state_of(0)), state_of(7))


def test_a_save_that_cannot_start_is_an_error_of_one_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED:\n No space left on device")

    checkpoints.save(state_of(4))
    monkeypatch.setattr(ocp.CheckpointManager, "save", refuse)
    with pytest.raises(TrainingError, match=r"^the checkpoint of step 5 cannot be written: RESOURCE_EXHAUSTED: No"):
        checkpoints.save(state_of(5))
    assert checkpoints.latest_step == 4


def test_a_save_returns_before_its_files_are_written(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = hold_writes(monkeypatch)
    checkpoints.save(state_of(4))
    assert not (folder / "4").exists()
    written.set()
    check_same(checkpoints.restore(state_of(0)), state_of(4))


def test_a_number_of_newest_checkpoints_and_the_best_are_kept(folder: Path) -> None:
    losses = {1: 0.5, 2: 0.25, 3: 0.75, 4: None, 5: 0.5, 6: 0.25}
    first = Checkpoints(folder, keep=1, keep_best=True)
    for step in (1, 2, 3):
        first.save(state_of(step), {"test_loss": losses[step]})
    first.close()
    assert first.steps == [2, 3]
    again = Checkpoints(folder, keep=2, keep_best=True)
    for step in (4, 5):
        again.save(state_of(step), {"test_loss": losses[step]})
    again.wait()
    assert again.steps == [2, 4, 5]
    again.save(state_of(6), {"test_loss": losses[6]})
    again.close()
    assert sorted(path.name for path in folder.iterdir()) == ["2", "5", "6"]


def test_notes_come_back(checkpoints: Checkpoints) -> None:
    notes = {"test_loss": 0.1, "epoch_sums": {"loss": 1 / 3, "count": 12.0}}
    checkpoints.save(state_of(4), notes)
    checkpoints.restore(state_of(0))
    assert checkpoints.notes(4) == notes
