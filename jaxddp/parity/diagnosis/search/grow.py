"""Search for faults that are present at once: the nearest explanations, with one more fault each."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Listed = TypeVar("Listed")  # faults as they are tried
Tried = TypeVar("Tried")


def grow(
    nearest: Iterable[Listed],
    with_others: Callable[[Listed], list[Tried]],
    explains: Callable[[Tried], bool],
    parts: Callable[[Tried], Iterable[Listed]],
) -> list[Tried]:
    """Add each further fault to the nearest faults, then to the next nearest, until one explains everything.

    Another part of what then explains it may do so with another fault, too; then neither is certain. So each further
    fault is added to these parts as well.

    Args:
        nearest: faults that alone explain too little, the nearest first.
        with_others: tries these faults with each other one, except where it has done so before.
        explains: whether faults explain everything.
        parts: the faults without one of them.

    >>> def with_others(one: str) -> list[str]:
    ...     return [one + other for other in "abc" if other != one]
    >>> grow("abc", with_others, lambda pair: set(pair) in ({*"ac"}, {*"bc"}), lambda pair: pair[1:])
    ['ab', 'ac', 'ca', 'cb']
    """
    tried: list[Tried] = []
    for faults in nearest:
        tried += with_others(faults)
        if explaining := [one for one in tried if explains(one)]:
            others = dict.fromkeys(part for one in explaining for part in parts(one))
            return tried + [more for part in others for more in with_others(part)]
    return tried
