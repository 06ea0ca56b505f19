"""A disk that fails at any write ends both trainers with one line that names the file, and the run can be resumed."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxddp import cli, train
from jaxddp.config import TrainConfig
from jaxddp.distributed.devices import prepare
from jaxddp.tracking import run_folder
from tests.support.failing_disk import FailingDisk
from torch_ref import train as torch_train
from torch_ref.config import TorchConfig

TINY: dict[str, Any] = {"dataset": "linear", "model": "linear", "platform": "cpu", "devices": 1, "epochs": 2}
TINY |= {"global_batch_size": 512, "checkpoint_every": 1}
TRAINERS: dict[str, tuple[Any, Any]] = {
    "jaxddp": (train.main, TrainConfig(**TINY)),
    "torch_ref": (torch_train.main, TorchConfig(**TINY, strategy="single")),
}
WORDS = {errno.ENOSPC: "no space left on device: make room", errno.EIO: "input/output error"}
WORDS |= {errno.EROFS: "read-only file system"}


def ends(trainer: str, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    """Run a trainer; return its exit code and what it printed on stderr."""
    main, config = TRAINERS[trainer]
    if trainer == "jaxddp":
        prepare(1, "cpu")
    capsys.readouterr()
    try:
        with cli.one_line_errors(show_traceback=False):
            main(dataclasses.replace(config, **options))
    except SystemExit as stop:
        return int(stop.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


def check_told_and_resumable(trainer: str, folder: Path, code: int, told: str, words: str, capsys: Any) -> None:
    """Check the exit code and the line of a run that a failing disk ended, and that it goes on where it was."""
    run, at_end = folder / "run", folder / "whole"
    if not at_end.exists():
        assert ends(trainer, capsys, output=str(at_end)) == (0, "")
    assert code == 2, told
    (line,) = told.splitlines()
    assert f"{run}" in line and words in line, line
    if not run.exists():
        return
    again = {"resume": str(run)} if (run / "config.json").exists() else {"output": str(run)}
    assert ends(trainer, capsys, **again) == (0, ""), line
    weights, whole = (load_file(place / "model.safetensors") for place in (run, at_end))
    assert all((weights[name] == whole[name]).all() for name in whole)
    steps = [json.loads(text)["step"] for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def fail(trainer: str, at: int, number: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the disk fail at a write, and check how the run ends; return whether there are so many writes."""
    threads = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        disk = FailingDisk(tmp_path / "run", patch)
        disk.fails_from, disk.number = at, number
        code, told = ends(trainer, capsys, output=str(tmp_path / "run"))
    if disk.writes < at:
        return False
    for thread in {*threading.enumerate()} - threads:
        if type(thread) is not threading.Thread:  # of Orbax, which the interpreter waits for at its end
            thread.join(60)
            assert not thread.is_alive(), thread.name
    check_told_and_resumable(trainer, tmp_path, code, told, WORDS[number], capsys)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    return True


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("at", "number"), [(3, errno.EROFS), (19, errno.EIO), (28, errno.ENOSPC)])
def test_a_write_that_fails_ends_the_run_with_one_line(
    trainer: str,
    at: int,
    number: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fail(trainer, at, number, tmp_path, capsys, monkeypatch)


@pytest.mark.large
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("number", WORDS)
def test_any_write_that_fails_ends_the_run_with_one_line(
    trainer: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, stride = 1 + list(WORDS).index(number), len(WORDS)
    while fail(trainer, at, number, tmp_path, capsys, monkeypatch):
        at += stride
    assert at > 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB, which only root may make."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.large
@pytest.mark.skipif(shutil.which("mount") is None, reason="mount is not installed")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_disk_that_is_full_after_some_pages_ends_the_run_with_one_line(
    trainer: str, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_check_space", lambda *_: None)
    ballast, page = small_disk / "ballast", os.statvfs(small_disk).f_bsize
    assert ends(trainer, capsys, output=str(small_disk / "whole")) == (0, "")
    for pages in range(40):
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - pages * page))
        code, told = ends(trainer, capsys, output=str(small_disk / "run"))
        ballast.unlink()
        if code == 0:
            break
        check_told_and_resumable(trainer, small_disk, code, told, WORDS[errno.ENOSPC], capsys)
        shutil.rmtree(small_disk / "run", ignore_errors=True)
    assert pages > 5
