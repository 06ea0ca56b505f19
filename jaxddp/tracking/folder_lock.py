"""Lock of a run folder: one process at a time, and never one that has died."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jaxddp.errors import InputError, tell
from jaxddp.files import check_regular, sync_open

LOCK_FILE = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # the file system has none, or they are off


@contextlib.contextmanager
def hold(folder: Path, where: str) -> Iterator[None]:
    """Lock a folder until the context ends, by flock on a file in it.

    The kernel releases the lock when the process ends, however it ends. The file stays, with the last owner in it,
    because removing it would let two processes lock two files of one name.

    On one machine this holds for every file system. Between machines it assumes that flock reaches the file server:
    so it does on NFS since Linux 2.6.12 (unless mounted with nolock or local_lock), CephFS and GPFS, and on Lustre
    mounted with flock. Where the file system has no locks, a note says so and the folder is not protected.

    Args:
        folder: folder that exists.
        where: flag and folder, for messages.

    Raises:
        InputError: another process owns the folder, or its lock is a link or another special file.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, hold(Path(folder), "--output runs/a"):
    ...     Path(folder, LOCK_FILE).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    True
    """
    path = folder / LOCK_FILE
    if path.is_symlink():
        raise InputError(f"{where}: its {LOCK_FILE} is a link, whose target would be overwritten; remove it")
    check_regular(f"{where}: its {LOCK_FILE}", path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            raise InputError(
                f"{where}: in use by {owner}; choose another folder, or wait until that run ends"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            tell(f"note: {where}: its file system has no locks; start no second run there")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        sync_open(descriptor)  # for other machines, which read it
        yield
    finally:
        os.close(descriptor)
