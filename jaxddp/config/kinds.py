"""Kinds of the values of options, as their type annotations tell them."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

UNIONS = (Union, UnionType)  # Optional[int], int | None
DTYPES = ("float32", "float64")  # those that a flag can have


def fits(value: Any, kind: Any) -> bool:
    """Return whether a plain value (see `plain`) has the type of a field; an integer is accepted as a float.

    >>> fits(3, float | None), fits(True, int), fits((1, 2), tuple[int, ...]), fits((1, 2), tuple[int, int, int])
    (True, False, True, False)
    >>> fits("runs/a", Path), fits((1, 2), list[int]), fits("gelu", Literal["relu", "gelu"]), fits(1, Literal[True])
    (True, True, True, False)
    """
    parts, origin = get_args(kind), get_origin(kind) or kind
    if origin in UNIONS:
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin in (tuple, list):
        if not isinstance(value, tuple):
            return False
        return len(value) == len(kinds := _of_items(value, kind)) and all(map(fits, value, kinds))
    if kind is Path:
        return isinstance(value, str)
    return type(value) in ((int, float) if kind is float else (kind,))  # isinstance would accept True as an integer


def plain(value: Any) -> Any:
    """Return a value as JSON or the command line gives it.

    A list becomes a tuple, a path text, a scalar array a number, and a dtype of NumPy, jax or torch its name.

    >>> plain([1, Path("runs/a")]), plain(np.int64(3)), plain(np.float32), plain(np.float16)
    ((1, 'runs/a'), 3, 'float32', <class 'numpy.float16'>)
    """
    if hasattr(value, "item") and not getattr(value, "shape", (1,)):  # of NumPy, jax or torch
        return value.item()
    if type(value) in (list, tuple):
        return tuple(map(plain, value))
    if isinstance(value, type | np.dtype) or type(value).__name__ == "dtype":  # the last: torch's
        name = f"{value}".removeprefix("torch.") if not isinstance(value, type) else np.dtype(value).name
        return name if name in DTYPES else value
    return str(value) if isinstance(value, Path) else value


def restored(value: Any, kind: Any) -> Any:
    """Return a plain value that fits a kind in that kind: the inverse of `plain`.

    >>> restored(("a", "b"), list[Path]) == [Path("a"), Path("b")], restored(None, Path | None)
    (True, None)
    """
    origin = get_origin(kind) or kind
    if origin in UNIONS:
        return restored(value, next((part for part in get_args(kind) if fits(value, part)), None))
    if origin in (tuple, list) and isinstance(value, tuple):
        return origin(map(restored, value, _of_items(value, kind)))
    return Path(value) if kind is Path else value


def choices_of(kind: Any) -> tuple[str, ...]:
    """Return the names that a kind lets one choose from; (): any.

    >>> choices_of(Literal["cpu", "gpu"] | None), choices_of(tuple[Literal["a", "b"], ...]), choices_of(int | str)
    (('cpu', 'gpu'), ('a', 'b'), ())
    """
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((choices for part in get_args(kind) if (choices := choices_of(part))), ())


def without_choices(kind: Any) -> Any:
    """Return a kind with text in place of a choice of names.

    >>> without_choices(Literal["cpu", "gpu"] | None), without_choices(tuple[Literal["a", "b"], ...])
    (typing.Optional[str], tuple[str, ...])
    """
    if get_origin(kind) is Literal:
        return str
    parts = tuple(without_choices(part) for part in get_args(kind))
    return (Union if get_origin(kind) in UNIONS else get_origin(kind))[parts] if parts else kind


def described(kind: Any) -> str:
    """Return the name of a kind in error messages.

    >>> described(int | str), described(float | None), described(tuple[str, ...]), described(Literal["relu", "gelu"])
    ('int or str', 'float', 'tuple', 'relu or gelu')
    """
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    parts = [part for part in get_args(kind) if part is not NoneType] if get_origin(kind) in UNIONS else [kind]
    return " or ".join((get_origin(part) or part).__name__ for part in parts)


def _of_items(value: tuple[Any, ...], kind: Any) -> tuple[Any, ...]:
    """Return the kinds of the items of a tuple or list."""
    parts = get_args(kind)
    if not parts:
        return tuple(map(type, value))
    return parts[:1] * len(value) if get_origin(kind) is list or parts[-1] is Ellipsis else parts
