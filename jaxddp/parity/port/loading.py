"""Port files: loading them, and locating the errors that their code raises."""

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Protocol

from jaxddp.errors import InputError
from jaxddp.parity.port.port import Port

MIN_LENGTH, SIMILARITY = 8, 0.85  # from which a name counts as a misspelt field


class PortSource(Protocol):
    """A small object that is pickled to another process and makes the port there."""

    @property
    def name(self) -> str:
        """Name in reports; the path, for a file."""

    def port(self) -> Port:
        """Make the port."""


@dataclass(frozen=True)
class PortFile:
    """A port in a file.

    Attributes:
        path: a Python file, see `jaxddp.parity.port`.
    """

    path: str

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.path

    def port(self) -> Port:
        """Load the file."""
        return load_port(self.path)


def load_port(path: str | Path) -> Port:
    """Run a port file and make a port of its top-level names.

    The file's folder is put on `sys.path` for good, so that the file and its functions can import modules beside it.

    Raises:
        InputError: the file is missing, raises, lacks a field, or has a field of the wrong kind.
    """
    path = Path(path)
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
    values = {f.name: getattr(module, f.name) for f in fields(Port) if hasattr(module, f.name)}
    _check_spelling(path, module, values)
    required = [f.name for f in fields(Port) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise InputError(f"{path}: has no {', '.join(missing)}")
    try:
        return Port(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_spelling(path: Path, module: ModuleType, given: Collection[str]) -> None:
    """Raise for a name that is nearly a field's: the field would silently keep its default."""
    absent = [f.name for f in fields(Port) if f.name not in given and len(f.name) >= MIN_LENGTH]
    for name in vars(module):
        near = difflib.get_close_matches(name, absent, n=1, cutoff=SIMILARITY)
        imported = getattr(getattr(module, name), "__module__", module.__name__) != module.__name__
        if near and name not in given and not name.startswith("_") and not imported:
            raise InputError(f"{path}: {name}: not a field of a port; did you mean {near[0]}?")


@contextlib.contextmanager
def errors_located(path: str | Path) -> Iterator[None]:
    """Turn whatever the code of a port file raises into one line with file, line number and message.

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
