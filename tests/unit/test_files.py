"""A file is written atomically, complete or not at all, and over nothing but what the same flag wrote."""

import contextlib
import errno
import io
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from jaxddp.errors import InputError
from jaxddp.files import BEGINNING, UNFINISHED, check_files, mark_of_picture, write_atomically


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


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_an_atomic_write_changes_no_target_of_an_unfinished_file(tmp_path, link):
    (tmp_path / "precious").write_text("precious")
    link(tmp_path / ("config.json" + UNFINISHED), tmp_path / "precious")
    write_atomically(tmp_path / "config.json", b"new")
    assert (tmp_path / "config.json").read_bytes() == b"new" and not (tmp_path / "config.json").is_symlink()
    assert (tmp_path / "precious").read_text() == "precious"


def special(path: Path, kind: str) -> Path:
    """Make something at a path that is no regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:  # its path must be short
            bound.bind(path.name)
    else:
        target = {"link": path.with_name("target"), "broken link": path.with_name("nowhere"), "device": os.devnull}
        path.with_name("target").write_text("precious")
        path.symlink_to(target[kind])
    return path


KINDS = ["fifo", "folder", "socket", "link", "broken link", "device"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_atomic_write_replaces_no_link_and_no_device(tmp_path, kind):
    path = special(tmp_path / "config.json", kind)
    before = path.lstat()
    with pytest.raises(OSError, match="is a ") as error:
        write_atomically(path, b"new")
    assert error.value.filename == str(path) and os.path.samestat(path.lstat(), before)
    assert not (tmp_path / "target").exists() or (tmp_path / "target").read_text() == "precious"
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))


def test_an_atomic_write_keeps_the_permissions_of_a_file(tmp_path):
    path = tmp_path / "port.py"
    path.write_text("old")
    path.chmod(0o750)
    write_atomically(path, b"new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o750


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_writes_over_no_link_and_no_device(tmp_path, kind):
    with pytest.raises(InputError, match=f"^--report {tmp_path}/a: is a "):
        check_files({"--report": (special(tmp_path / "a", kind), b"")})


def test_a_command_writes_over_nothing_but_what_the_same_flag_wrote(tmp_path):
    path = tmp_path / "a"
    for beginning in (b"<mark>", b"<mark> more", b""):
        path.write_bytes(beginning)
        check_files({"--report": (path, b"<mark>"), "--json": (tmp_path / "new", b"{")})
    for beginning in (b"\n", b" <mark>", b"<mar", b"import jax", b"\0" * 5000):
        path.write_bytes(beginning)
        with pytest.raises(InputError, match="exists, and does not begin as what this version's --report writes"):
            check_files({"--report": (path, b"<mark>")})
        assert path.read_bytes() == beginning


@pytest.mark.parametrize("spelling", ["a", "./a", "../{folder}/a", "through/a", "b"])
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("mark", [b"", None])
def test_two_flags_name_two_files(tmp_path, monkeypatch, spelling, exists, mark):
    monkeypatch.chdir(tmp_path)
    Path("through").symlink_to(tmp_path)
    if exists:
        Path("a").touch()
        Path("b").hardlink_to("a")
    elif spelling == "b":
        return
    named = Path(spelling.format(folder=tmp_path.name))
    with pytest.raises(InputError, match=f"^--report {named}: is the file of --json a; choose another name"):
        check_files({"--json": (Path("a"), mark), "--report": (named, b"")})
    check_files({"--json": (Path("a"), None), "--report": (named, None), "--patch": (None, b"")})
    check_files({"--json": (Path("a"), b""), "--report": (Path("c"), b""), "--patch": (Path("d"), b"")})


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere/a", "folder nowhere does not exist"),
        ("file/a", "folder file does not exist"),
        ("x" * 300, "file name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, monkeypatch, path, problem):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(InputError, match=f"^--report {path}: {problem}"):
        check_files({"--report": (Path(path), b"")})


def test_pictures_show_which_program_drew_them():
    png = io.BytesIO()
    Figure().savefig(png, format="png", metadata={"Software": "jaxddp.plan"})
    assert re.match(mark_of_picture("jaxddp.plan"), png.getvalue()[:BEGINNING], re.DOTALL)
    assert not re.match(mark_of_picture("jaxddp.plot"), png.getvalue()[:BEGINNING], re.DOTALL)


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
