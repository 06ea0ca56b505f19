"""Python files of the user: running one, and locating the errors that its code raises."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jaxddp.errors import InputError


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return it as a module.

    The file's folder is put on `sys.path` for good, so that the file and its functions can import modules beside it.

    Raises:
        InputError: the file is missing, is no Python file, or raises.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"port_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: must be a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if (folder := str(path.parent.absolute())) not in sys.path:
        sys.path.insert(0, folder)
    with errors_located(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def errors_located(path: str | Path) -> Iterator[None]:
    """Turn whatever the code of a user's file raises into one line with file, line number and message.

    Raises:
        InputError: in place of any other exception.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        line = _line(error, Path(path))
        where = f"{path}: " if line is None else f"{path}: line {line}: "
        raise InputError(f"{where}{type(error).__name__}: {_first_line(error)}") from error


def _line(error: BaseException, path: Path) -> int | None:
    """Return the innermost line of the file in the traceback; None if the file is not in it."""
    here = str(path.absolute())
    if isinstance(error, SyntaxError) and error.filename == here:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    return lines[-1] if lines else None


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, without the pages that frameworks append."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or "without a message"
