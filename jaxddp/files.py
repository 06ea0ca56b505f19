"""Atomic writing of files, errors of writing in one line, and checks of paths."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxddp.errors import InputError, MovedError, TrainingError

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # some file systems synchronize no folder, some no file


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by renaming a complete temporary file, so that no reader sees a part of it.

    The file is on the disk before it gets its name, and the name when the function returns; a machine that loses
    power keeps the old file or has the new one. Links are not followed: one with either name is replaced.

    Raises:
        OSError: the file cannot be written; `filename` is `path`. An old file stays as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes"), b"complete")
    ...     Path(folder, "notes").read_bytes()
    b'complete'
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        try:
            unfinished.unlink(missing_ok=True)  # of a killed process, or a link, whose target must not change
            with unfinished.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_open(descriptor)
    finally:
        os.close(descriptor)


def sync_open(descriptor: int) -> None:
    """Write an open file or folder to the disk, where the file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def check_in_place(path: Path, descriptor: int) -> None:
    """Check that a path still leads to an open file or folder, which stays writable even if moved or removed.

    Raises:
        MovedError: the folder was moved or removed.
        TrainingError: the file was moved or removed.

    >>> with Path(os.devnull).open() as file:
    ...     check_in_place(Path(os.devnull), file.fileno())
    """
    opened = os.fstat(descriptor)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(path.stat(), opened):
            return
    is_folder, now = stat.S_ISDIR(opened.st_mode), Path()
    with contextlib.suppress(OSError):  # only Linux shows where an open file is
        now = Path(f"/proc/self/fd/{descriptor}").readlink()
    known = now.is_absolute() and now.exists()  # Linux adds " (deleted)" to the name of a removed file
    message = f"{path}: was {f'moved to {now}' if known else 'moved or removed'} during the run"
    advice = "; continue there with --resume" if is_folder and known else ""
    raise (MovedError if is_folder else TrainingError)(message + advice)


@contextlib.contextmanager
def writing(kind: type[Exception], place: Path | None = None, advice: str = "") -> Iterator[None]:
    """Turn an `OSError` of writing a file (a full disk, a lost one) into an error of one line.

    Args:
        kind: type of the error: `InputError` before training, `TrainingError` later.
        place: file, if the `OSError` does not name it.
        advice: end of the message.

    >>> with writing(InputError, Path("runs/a/notes")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: runs/a/notes: cannot be written (no space left on device)
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise kind(f"{error.filename or place}: cannot be written ({reason}){advice}") from error


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
