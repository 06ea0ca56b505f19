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
    fault is added to these parts as well, and to the parts of what that finds.

    Args:
        nearest: faults that explain too little by themselves, the nearest first.
        with_others: tries these faults with each other one, except where it has done so before.
        explains: whether faults explain everything.
        parts: the faults without one of them.

    >>> def with_others(one: str) -> list[str]:
    ...     return [one + other for other in "abcd" if other != one]
    >>> grow("abcd", with_others, lambda pair: {*pair} in ({*"ac"}, {*"bc"}), lambda pair: pair[1:])
    ['ab', 'ac', 'ad', 'ca', 'cb', 'cd', 'ba', 'bc', 'bd']
    """
    tried: list[Tried] = []
    done: set[Listed] = set()
    for faults in nearest:
        done.add(faults)
        tried += with_others(faults)
        if any(map(explains, tried)):
            break
    while left := {part: None for one in tried if explains(one) for part in parts(one) if part not in done}:
        done.update(left)
        tried += [more for part in left for more in with_others(part)]
    return tried
