"""Load port files and check their fields."""

import difflib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Protocol

from jaxddp.errors import InputError
from jaxddp.parity.port.port import Port
from jaxddp.scripts import run_file

MIN_LENGTH, SIMILARITY = 8, 0.85  # least values at which a name counts as a misspelt field


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
        path: a Python file; see `jaxddp.parity.port`.
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
    """Run a port file (see `jaxddp.scripts.run_file`) and make a port of its top-level names.

    Raises:
        InputError: the file is missing, raises, lacks a field, or has a field of the wrong kind.
    """
    path = Path(path)
    module = run_file(path)
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
    """Raise if a name is almost that of a field, because the field would silently keep its default."""
    absent = [f.name for f in fields(Port) if f.name not in given and len(f.name) >= MIN_LENGTH]
    for name in vars(module):
        near = difflib.get_close_matches(name, absent, n=1, cutoff=SIMILARITY)
        imported = getattr(getattr(module, name), "__module__", module.__name__) != module.__name__
        if near and name not in given and not name.startswith("_") and not imported:
            raise InputError(f"{path}: {name}: not a field of a port; did you mean {near[0]}?")
