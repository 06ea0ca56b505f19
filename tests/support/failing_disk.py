"""A disk that fails: from the n-th write of Python into a folder on, each write raises an error of the system."""

import builtins
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

ALWAYS = ("mkdir", "fsync", "replace", "rename", "write", "ftruncate")


class FailingDisk:
    """Writes into a folder that are counted, and fail from one on.

    Attributes:
        writes: number of writes so far.
        fails_from: number of the first write that fails; None: none does.
        number: errno of the error.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.writes, self.number = 0, errno.ENOSPC
        self.fails_from: int | None = None
        self._folder = str(folder)
        for name in ALWAYS:
            patch.setattr(os, name, self._counted(getattr(os, name), lambda *_: True))
        opens = lambda _, flags=0, *more: bool(flags & (os.O_WRONLY | os.O_RDWR))  # noqa: E731
        patch.setattr(os, "open", self._counted(os.open, opens))
        opener = self._counted(io.open, lambda _, mode="r", *more: bool({*mode} & {*"wax+"}))
        patch.setattr(io, "open", opener)
        patch.setattr(builtins, "open", opener)

    def _counted(self, real: Any, writes: Any) -> Any:
        def call(place: Any, *args: Any, **options: Any) -> Any:
            mode = (options["mode"],) if "mode" in options else args
            if self._path(place).startswith(self._folder) and writes(place, *mode):
                self.writes += 1
                if self.fails_from is not None and self.writes >= self.fails_from:
                    raise OSError(self.number, os.strerror(self.number), *([] if isinstance(place, int) else [place]))
            return real(place, *args, **options)

        return call

    @staticmethod
    def _path(place: Any) -> str:
        if isinstance(place, int):
            link = Path(f"/proc/self/fd/{place}")
            return str(link.readlink()) if link.is_symlink() else ""
        return str(Path(os.fsdecode(place)).absolute())
