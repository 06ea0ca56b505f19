"""Rename a complete checkpoint: its contents reach the disk before its name does."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity

from jaxddp.checkpoint.handlers import Errors, noted
from jaxddp.files import sync


def renamed_folder(errors: Errors) -> type[atomicity.AtomicRenameTemporaryPath]:
    """Return Orbax's class of a folder that gets its name once it is complete.

    Orbax synchronizes only arrays; a machine that loses power could keep the name of a checkpoint and lose the rest.

    Args:
        errors: list to which the errors of making and renaming it are added. Orbax raises them only after all processes
            have met, and the other processes wait for this one.
    """

    class NamedWhenComplete(atomicity.AtomicRenameTemporaryPath):
        async def create(self) -> Any:
            with noted(errors):
                return await super().create()

        async def finalize(self) -> None:
            with noted(errors):
                await asyncio.to_thread(_sync_all, Path(self.get()))
                await super().finalize()
                await asyncio.to_thread(sync, Path(self.get_final()).parent)

    return NamedWhenComplete


def _sync_all(folder: Path) -> None:
    """Write all files of a folder to the disk, and their names."""
    for path in (*folder.rglob("*"), folder):
        with contextlib.suppress(FileNotFoundError):  # a file that NFS keeps for a deleted one disappears by itself
            sync(path)
