"""Kinds of the values of options, as their type annotations tell them."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

UNIONS = (Union, UnionType)  # Optional[int], int | None


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value, as JSON or Python writes it, has the type of a field; an integer is accepted as a float.

    >>> fits(3, float | None), fits(True, int), fits((1, 2), tuple[int, ...]), fits((1, 2), tuple[int, int, int])
    (True, False, True, False)
    """
    parts = get_args(kind)
    if get_origin(kind) in UNIONS:
        return any(fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if isinstance(value, tuple) and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(fits, value, parts))
    return type(value) in ((int, float) if kind is float else (kind,))  # isinstance would accept True as an integer


def plain(value: Any) -> Any:
    """Return a value as the command line gives it: a list as a tuple, a path as text, a scalar array as a number.

    >>> import numpy as np
    >>> plain([1, 2]), plain(Path("runs/a")), plain(np.int64(3))
    ((1, 2), 'runs/a', 3)
    """
    if hasattr(value, "item") and not getattr(value, "shape", (1,)):  # of NumPy, jax or torch
        return value.item()
    return tuple(value) if isinstance(value, list) else str(value) if isinstance(value, Path) else value


def described(kind: Any) -> str:
    """Return the name of a kind in error messages.

    >>> described(int | str), described(float | None), described(tuple[str, ...])
    ('int or str', 'float', 'tuple')
    """
    parts = [part for part in get_args(kind) if part is not NoneType] if get_origin(kind) in UNIONS else [kind]
    return " or ".join((get_origin(part) or part).__name__ for part in parts)
