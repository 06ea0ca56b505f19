"""Keep Orbax from printing, and from paths that it cannot write to."""

import contextlib
import functools
import glob
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@functools.cache
def silence() -> None:
    """Silence Orbax and tensorstore, whose errors are raised here in one line."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    print_unraisable = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # of writes that end after another has failed
            print_unraisable(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def plain_path(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` without the characters that Orbax cannot write to: a link, if it has some.

    Orbax merges files by a glob pattern, in which "[0]" does not match itself; tensorstore takes "\\" for "/".
    """
    if glob.escape(str(folder)) == str(folder) and "\\" not in str(folder):
        yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxddp-") as temporary:
        link = Path(temporary, "checkpoints")
        link.symlink_to(folder)
        yield link
