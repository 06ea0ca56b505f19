"""Functions of a library replaced wherever a module holds them, for a while."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

Pairs = Iterable[tuple[Callable[..., Any], Callable[..., Any]]]


@contextmanager
def replaced(pairs: Pairs, keeps: Callable[[str, ModuleType], bool] = lambda name, module: False) -> Iterator[None]:
    """Replace functions wherever a module holds them, under any name, while the body of the `with` statement runs.

    Args:
        pairs: functions and their replacements.
        keeps: (name, module) -> whether a module keeps the functions.

    >>> import math
    >>> with replaced([(math.sqrt, lambda x: 7.0)]):
    ...     math.sqrt(4.0)
    7.0
    """
    known = {id(function): replacement for function, replacement in pairs}
    with ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if keeps(module_name, module):
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in known:
                    stack.enter_context(mock.patch.object(module, name, known[id(value)]))
        yield
