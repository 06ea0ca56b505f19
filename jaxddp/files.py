"""Atomic writing of files, and checks of paths."""

import stat
from pathlib import Path

from jaxddp.errors import InputError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by renaming a complete temporary file, so that no reader sees a part of it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes"), b"complete")
    ...     Path(folder, "notes").read_bytes()
    b'complete'
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    """Raise `InputError` unless the folder of `path` exists and `path` is not a folder itself.

    >>> check_file(Path("nowhere/report.html"))
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: nowhere/report.html: folder nowhere does not exist
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; must be a file")


def check_regular(where: str, path: Path) -> None:
    """Raise `InputError` for a pipe or a device, whose end a reader might wait for in vain.

    A folder passes, and a path that does not exist; the error of opening them says so.

    Args:
        where: flag and path, for the message.

    >>> check_regular("--weights /dev/zero", Path("/dev/zero"))
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --weights /dev/zero: is a pipe, a device or a socket; must be a regular file
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{where}: is a pipe, a device or a socket; must be a regular file")
