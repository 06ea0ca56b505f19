"""Checkpoints are written in the background, and a failed write is told."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from jaxddp.checkpoint import Checkpoints
from jaxddp.checkpoint.record import RecordHandler
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import MovedError, TrainingError
from tests.support.checkpoint_states import check_same, save_all, state_of


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


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no save end before the event is set, and no array be written."""
    event = threading.Event()
    write = RecordHandler.save

    def late(handler: RecordHandler, directory: Any, args: Any) -> None:
        assert event.wait(60)
        write(handler, directory, args)

    monkeypatch.setattr(RecordHandler, "save", late)
    return event


def refuse(*args: Any, **kwargs: Any) -> None:
    raise ValueError("RESOURCE_EXHAUSTED:\n No space left on device")


def test_a_failed_write_is_told_at_the_next_save_and_earlier_checkpoints_stay(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpoints, 4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(RecordHandler, "save", refuse)
        checkpoints.save(state_of(6))
        with pytest.raises(TrainingError, match=rf"^{folder}: the checkpoint of step 6 cannot be written: RESOURCE_"):
            checkpoints.save(state_of(7))
    assert checkpoints.steps == [4, 5]
    checkpoints.save(state_of(7))
    check_same(checkpoints.restore(state_of(0)), state_of(7))


def test_a_clock_that_jumps_a_day_harms_no_save(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it jump while Orbax waits for the arrays, by its default for 20 minutes."""
    written, now = hold_writes(monkeypatch), time.time
    checkpoints.save(state_of(4))
    time.sleep(0.1)  # until Orbax waits
    monkeypatch.setattr(time, "time", lambda: now() + 86400)
    written.set()
    checkpoints.wait()
    check_same(checkpoints.restore(state_of(0)), state_of(4))


def test_a_save_that_cannot_start_is_an_error_of_one_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(state_of(4))
    monkeypatch.setattr(ocp.CheckpointManager, "save", refuse)
    with pytest.raises(TrainingError, match=r": the checkpoint of step 5 cannot be written: RESOURCE_EXHAUSTED: No"):
        checkpoints.save(state_of(5))
    assert checkpoints.latest_step == 4


def test_a_save_returns_before_its_files_are_written(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change NumPy arrays after the call: the save has copied them."""
    written, state = hold_writes(monkeypatch), state_of(4)
    checkpoints.save(state)
    assert not (folder / "4").exists()
    for leaf in state.params.values():
        leaf += 1
    written.set()
    check_same(checkpoints.restore(state_of(0)), state_of(4))


@pytest.mark.parametrize("late", [False, True], ids=["before a save", "during a save"])
@pytest.mark.parametrize("moved", ["checkpoints", "run"])
def test_a_folder_that_is_moved_is_told_and_keeps_its_checkpoints(
    moved: str, late: bool, checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpoints, 4)
    written = hold_writes(monkeypatch)
    if late:
        checkpoints.save(state_of(5))
    else:
        written.set()
    old, new = (folder, folder.with_name("b")) if moved == "checkpoints" else (folder.parent, folder.parents[1] / "b")
    old.rename(new)
    written.set()
    now = new if moved == "checkpoints" else new / "checkpoints"
    message = f"^{folder}: was moved to {now} during the run; continue there with --resume$"
    for call in (checkpoints.wait, lambda: checkpoints.save(state_of(6)), checkpoints.newest_intact):
        with pytest.raises(MovedError, match=message):
            call()
    with contextlib.closing(Checkpoints(now)) as there:
        check_same(there.restore(state_of(0)), state_of(4))


def test_a_checkpoint_is_on_the_disk_before_and_after_it_gets_its_name(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep it through a loss of power; what Orbax writes at the very end is not read."""
    told: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        told.append(("sync", f"{Path('/proc/self/fd', str(descriptor)).readlink()}"))
        sync(descriptor)

    def record_rename(before: Any, after: Any) -> None:
        told.append(("rename", os.fspath(after)))
        rename(before, after)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    checkpoints.create()
    checkpoints.save(state_of(4))
    checkpoints.wait()
    renamed = told.index(("rename", f"{folder / '4'}"))
    unfinished = f"{folder / '4.orbax-checkpoint-tmp'}"
    synced = {path.replace(unfinished, f"{folder / '4'}") for call, path in told[:renamed] if call == "sync"}
    late = {folder / "4" / "commit_success.txt"}
    assert {str(path) for path in {*(folder / "4").rglob("*"), folder / "4"} - late} <= synced
    assert ("sync", f"{folder}") in told[renamed:]
    assert ("sync", f"{folder.parent}") in told[:renamed]
    for name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
        (folder / "4" / name).write_bytes(b"")
    check_same(checkpoints.restore(state_of(0)), state_of(4))
