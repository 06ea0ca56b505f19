"""Keep compiled programs for later runs, in the user's cache folder, by jax's persistent compilation cache."""

import contextlib
import functools
import hashlib
import os
import platform
import re
import stat
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxddp.errors import tell

MAX_BYTES = 2**30  # in the folder of one jaxlib and processor; the default training job's are 0.2 MB
WRITING = 60.0  # seconds in which a file may still be written; a large program's 100 MB take less on a slow disk


def keep_programs() -> Path | None:
    """Let jax keep compiled programs in `$XDG_CACHE_HOME/jaxddp`, by default `~/.cache/jaxddp`, for later runs.

    Programs are code, so the folder must belong to the user, and no other user may write to it. Each version of jaxlib
    and each kind of processor has its own. Several processes may share a folder; each file is written once, and one
    that is damaged is removed, see `replace_damaged`. Nothing changes if a folder is configured already, as by
    `JAX_COMPILATION_CACHE_DIR`, or the cache is switched off by `JAX_ENABLE_COMPILATION_CACHE=false`.

    Returns:
        The folder; None: jax's configuration is unchanged.
    """
    replace_damaged()
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return None
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "jaxddp" / f"jaxlib-{jaxlib.version.__version__}-{_processor()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _only_user_writes(folder):
            return None
        _remove_oldest(folder, MAX_BYTES)
    except (OSError, RuntimeError):  # no place in the home, or no home
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


@functools.cache
def replace_damaged() -> None:
    """Let jax replace damaged files of its compilation cache, and report the first in one line.

    jax warns of a file that it cannot read, or not write to its end, and compiles; but it writes no file of a name that
    exists, so every later process would warn again. It compiles and writes after the warning, which is where the
    file can be removed. A file that cannot be read may be one that another process is writing: it stays for `WRITING`
    seconds, and the warning is not shown.
    """
    show = warnings.showwarning
    reported: list[str] = []

    def remove_or_show(message: Warning | str, *place: Any, **more: Any) -> None:
        folder = jax.config.values["jax_compilation_cache_dir"]
        found = re.match(r"Error (read|writ)ing persistent compilation cache entry for '(.+?)'", str(message))
        if found is None or folder is None:
            show(message, *place, **more)
            return
        what, name = found.groups()
        paths = list(Path(folder).glob(f"{name}*-cache"))  # of all programs of this name: jax does not say which
        if what == "read" and any(time.time() - _written(path) < WRITING for path in paths):
            return
        for path in paths:
            with contextlib.suppress(OSError):  # another process may be first, or the folder read-only
                path.unlink()
        if not reported:
            reported.append(name)
            tell(f"note: {folder}: a damaged program ({name}) is compiled again")

    warnings.showwarning = remove_or_show


def _written(path: Path) -> float:
    """Return when a file was written; 0: another process has removed it."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0


def _only_user_writes(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove_oldest(folder: Path, max_bytes: int) -> None:
    """Remove the files read least recently, until the others have `max_bytes` at most."""
    files = [(path.stat(), path) for path in folder.iterdir()]
    excess = sum(status.st_size for status, _ in files) - max_bytes
    for status, path in sorted(files, key=lambda file: file[0].st_atime):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)  # another process may be first
        excess -= status.st_size


def _processor() -> str:
    """Return a short name of the processor's instruction set, for which XLA compiles."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    words = [platform.machine(), *(flags or [platform.processor()])]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
