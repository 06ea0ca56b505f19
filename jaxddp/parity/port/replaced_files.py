"""Texts that replace those of a user's files in this process, so that an edit is tried and no file changed."""

import os
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from jaxddp.scripts import users_file

Texts = Mapping[str, str]  # path -> text
MAIN = ("__main__", "__mp_main__")  # what is pickled may be defined there
_texts: dict[str, str] = {}  # by the files' real paths
_code_in_file = SourceFileLoader.get_code


def replace_files(texts: Texts, port: Path) -> None:
    """Let imports read these texts in place of the files, until the next call; modules next to the port are forgotten.

    Args:
        texts: path -> text.
        port: the program.
    """
    fresh = {os.path.realpath(path): text for path, text in texts.items()}
    if fresh == _texts:
        return
    _texts.clear()
    _texts.update(fresh)
    SourceFileLoader.get_code = _code  # type: ignore[assignment, method-assign]
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file is not None and name not in MAIN and users_file(file, port) is not None:
            del sys.modules[name]


def _code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    """Return the code of a module, from the text that replaces its file if there is one."""
    text = _texts.get(os.path.realpath(loader.path))
    return _code_in_file(loader, fullname) if text is None else compile(text, loader.path, "exec", dont_inherit=True)
