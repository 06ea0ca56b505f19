"""Damaged and unfinished checkpoints are named, and the one before is used."""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.checkpoint import Checkpoints
from jaxddp.checkpoint.handlers import StateHandler
from jaxddp.errors import InputError
from tests.support.checkpoint_states import RUN, check_same, files_of, save_all, state_of


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

    save_all(checkpoints, 4, 5)
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
    elif kind.startswith("pipe"):
        pipe = folder / "record" / "record.json" if kind == "pipe as record" else metadata
        pipe.unlink()
        os.mkfifo(pipe)
    elif kind == "empty":
        shutil.rmtree(folder / "state")
    else:
        shutil.rmtree(folder / "state")
        shutil.copytree(folder.parent / "4" / "state", folder / "state")


DAMAGES = ["truncated", "no metadata", "other metadata", "no record", "other record", "empty", "arrays of another step"]
DAMAGES += ["pipe as record", "pipe as metadata"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tensorstore's pending reads
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    kind: str, checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(checkpoints, 4, 5)
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
    save_all(saved, 4, 5)
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
    # Orbax draws the files' names, and their number varies, so other bits are flipped in each run. [7 of 28, 8 of 26;
    # most bits of the small files mean nothing]
    assert noticed


def test_a_flipped_bit_names_the_array(
    checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpoints, 4, 5)
    read = StateHandler.read

    def flipped(handler: StateHandler, directory: Path, like: Any) -> Any:
        restored = read(handler, directory, like)
        if directory.parent.name == "5":
            restored["params"]["bn.scale"].view(np.uint32)[2] ^= 1
        return restored

    monkeypatch.setattr(StateHandler, "read", flipped)
    check_same(checkpoints.restore(state_of(0)), state_of(4))
    expected = "the checkpoint of step 5 is damaged (params.bn.scale); continuing from step 4\n"
    assert capsys.readouterr().err == expected


def test_without_an_intact_checkpoint_each_is_named(checkpoints: Checkpoints, folder: Path) -> None:
    save_all(checkpoints, 4, 5)
    for step in (4, 5):
        damage("no record", folder / str(step))
    with pytest.raises(InputError) as caught:
        checkpoints.restore(state_of(0))
    each = [f"the checkpoint of step {step} is damaged (record.json is missing)" for step in (5, 4)]
    assert str(caught.value) == f"--resume {folder.parent}: {'; '.join(each)}; none is intact"
    assert checkpoints.newest_intact() is None
    assert checkpoints.steps == [4, 5]  # nothing was renamed


def test_a_checkpoint_of_a_newer_jaxddp_is_refused(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(checkpoints, 4)
    with monkeypatch.context() as patch:
        patch.setattr("jaxddp.checkpoint.record.FORMAT", 2)
        save_all(checkpoints, 5)
    with pytest.raises(InputError) as caught:
        checkpoints.restore(state_of(0))
    message = "the checkpoint of step 5 has format 2, and this jaxddp reads up to 1; update jaxddp"
    assert str(caught.value) == f"--resume {folder.parent}: {message}"
    assert checkpoints.steps == [4, 5]
