"""Write files that are whole at any time."""

from pathlib import Path

from jaxddp.errors import InputError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is whole at any time: the old one until the new one is complete.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes"), b"all of it")
    ...     Path(folder, "notes").read_bytes()
    b'all of it'
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    """Raise `InputError` unless a file can be there: its folder exists, and it is no folder itself.

    >>> check_file(Path("nowhere/report.html"))
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: nowhere/report.html: there is no folder nowhere
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{path}: must be a file, and is a folder")
