"""A file is written atomically: complete or not at all, through a loss of power, and never to the target of a link."""

import errno
import os
import stat
from pathlib import Path

import pytest

from jaxddp.files import write_atomically


def test_an_atomic_write_is_on_the_disk_before_and_after_the_file_gets_its_name(tmp_path, monkeypatch):
    calls, rename, sync = [], Path.replace, os.fsync

    def record(name, function):
        return lambda *args: (
            calls.append((name, isinstance(args[0], int) and stat.S_ISDIR(os.fstat(args[0]).st_mode))),
            function(*args),
        )[1]

    monkeypatch.setattr(os, "fsync", record("sync", sync))
    monkeypatch.setattr(Path, "replace", record("rename", rename))
    write_atomically(tmp_path / "config.json", b"new")
    assert calls == [("sync", False), ("rename", False), ("sync", True)]


@pytest.mark.parametrize("name", ["config.json", "config.json.tmp"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_an_atomic_write_replaces_a_link_and_not_its_target(tmp_path, link, name):
    (tmp_path / "precious").write_text("precious")
    link(tmp_path / name, tmp_path / "precious")
    write_atomically(tmp_path / "config.json", b"new")
    assert (tmp_path / "config.json").read_bytes() == b"new" and not (tmp_path / "config.json").is_symlink()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    write_atomically(path, b"newer")

    def refuse(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(path, b"newest")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]
