"""Lines of a port at which its torch objects are made: modules, optimizers, schedulers. Imports no jax."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch import nn

from jaxddp.parity.operations import SourceLine, calling_lines, is_of_user, line_of_user

Made = tuple[Any, SourceLine | None]


@contextmanager
def noted(kind: type) -> Iterator[list[Made]]:
    """Note each object of a class that is made, with the user's line that makes it.

    >>> with noted(nn.Module) as made:
    ...     layer = nn.GELU()
    >>> made  # no user's file has made it
    [(GELU(approximate='none'), None)]
    """
    made: list[Made] = []
    make: Any = kind.__init__  # type: ignore[misc]

    @wraps(make)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        line = line_of_user(calling_lines())
        make(self, *args, **kwargs)
        made.append((self, line))

    with mock.patch.object(kind, "__init__", note):
        yield made


def lines_of_layers(model: nn.Module, made: Sequence[Made]) -> dict[str, SourceLine]:
    """Return the line that makes each of a library's layers by its name; a module of the user's own has none."""
    lines = {id(module): line for module, line in made if line is not None and not _is_own(module)}
    return {name: lines[id(module)] for name, module in model.named_modules() if id(module) in lines}


def _is_own(module: nn.Module) -> bool:
    return is_of_user(getattr(sys.modules.get(type(module).__module__), "__file__", None) or "")
