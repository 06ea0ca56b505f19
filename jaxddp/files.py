"""Atomic writing of files, errors of writing in one line, and checks of paths."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxddp.errors import InputError, MovedError, TrainingError, reason

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # some file systems synchronize no folder, some no file
FULL = (errno.ENOSPC, errno.EDQUOT)
UNFINISHED = ".jaxddp-tmp"  # ends the names of files that are not complete yet, which no file of a user's has
SPECIAL = "a pipe, a device or a socket"
BEGINNING = 1024  # bytes of a file that show which flag wrote it


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by renaming a complete temporary file, so that no reader sees a part of it.

    The file is on the disk before it gets its name, and the name when the function returns; a machine that loses
    power keeps the old file or has the new one. An old file's permissions stay.

    Raises:
        OSError: the file cannot be written, or a link, a folder, a pipe or a device is there; `filename` is `path`.
            What is there stays as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes"), b"complete")
    ...     Path(folder, "notes").read_bytes()
    b'complete'
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with naming(path):
        if kind := unwritable(path):
            raise OSError(errno.EEXIST, f"is {kind}")
        try:
            unfinished.unlink(missing_ok=True)  # of a killed process, or a link, whose target must not change
            with unfinished.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(path, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` name a file: one of an open file names none.

    >>> with naming(Path("runs/a/log")):
    ...     raise OSError(errno.EIO, "Input/output error")
    Traceback (most recent call last):
    ...
    OSError: [Errno 5] Input/output error: 'runs/a/log'
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk, where the file system can."""
    with naming(path):
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
    jaxddp.errors.InputError: runs/a/notes: cannot be written (no space left on device: make room)
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or place}: cannot be written ({reason_of(error)}){advice}") from error


def reason_of(error: OSError) -> str:
    """Return what an error of the system says, and what to do about a full disk.

    >>> reason_of(OSError(errno.ENOSPC, "No space left on device"))
    'no space left on device: make room'
    """
    return (error.strerror or type(error).__name__).lower() + ": make room" * (error.errno in FULL)


def read_json(path: Path, what: str = "cannot be read", advice: str = "") -> Any:
    """Return the content of a JSON file.

    Args:
        what, advice: of a file that cannot be read, what is wrong, and the end of the message.

    Raises:
        InputError: the file is missing, or is not a regular file of JSON.
    """
    check_regular(f"{path}", path)
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: {what} ({reason(error)}){advice}") from error


def check_files(files: Mapping[str, tuple[Path | None, bytes | None]]) -> None:
    r"""Check that a command may write its files: each is new, or empty, or begins as what the same flag writes.

    Args:
        files: flag -> path, None if it is not given, and a regular expression of the beginning of what it writes; None:
            a file that the command reads, which it must not write too.

    Raises:
        InputError: a file is another one, a link, a folder, a pipe or a device; its folder is missing or read-only; or
            two flags name one file, in whatever spelling.

    >>> check_files({"--json": (Path(os.devnull), rb"{")})
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --json /dev/null: is a pipe, a device or a socket; must be a new or a regular file
    """
    taken: dict[object, tuple[str, bytes | None]] = {}
    for flag, (path, mark) in files.items():
        if path is None:
            continue
        where = f"{flag} {path}"
        try:
            if mark is not None:
                _check_replaceable(where, path, mark, flag)
            earlier, mark_of_earlier = taken.setdefault(_place(path), (where, mark))
        except OSError as error:
            raise InputError(f"{where}: {reason_of(error)}; must be a file") from None
        if earlier != where and (mark, mark_of_earlier) != (None, None):
            raise InputError(f"{where}: is the file of {earlier}; choose another name")


def _check_replaceable(where: str, path: Path, mark: bytes, flag: str) -> None:
    """Raise `InputError` unless a path is new, or is a regular file that is empty or begins with the mark."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{where}: folder {path.parent} does not exist")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{where}: folder {path.parent} is not writable")
    if kind := unwritable(path):
        raise InputError(f"{where}: is {kind}; must be a new or a regular file")
    if path.exists():
        with path.open("rb") as file:
            beginning = file.read(BEGINNING)
        if beginning and not re.match(mark, beginning, re.DOTALL):
            raise InputError(
                f"{where}: exists, and does not begin as what this version's {flag} writes; "
                "remove it, or choose another name"
            )


def _place(path: Path) -> object:
    """Return what all paths to one file share, those by links too."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_dev, path.stat().st_ino
    return path.absolute().parent.resolve() / path.name


def unwritable(path: Path) -> str:
    """Return what is at a path if a file must not replace it; "" if nothing or a regular file is there.

    >>> unwritable(Path("/")), unwritable(Path("/nowhere"))
    ('a folder', '')
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISLNK(mode):
        return "a link"
    return "" if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else SPECIAL


def mark_of_picture(program: str) -> bytes:
    """Return the beginning of a PNG that Matplotlib has saved with {"Software": program}, as a regular expression."""
    return rb"\x89PNG.{1,400}Software\0" + re.escape(program.encode())


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
        raise InputError(f"{where}: is {SPECIAL}; must be a regular file")
