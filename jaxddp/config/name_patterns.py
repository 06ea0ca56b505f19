"""Selection of parameters by shell-style patterns of their names."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from jaxddp.errors import InputError, listed


def matching(option: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that any pattern matches, in the order of `names`.

    Args:
        option: name of the option that holds the patterns, for the message.

    Raises:
        InputError: a pattern matches no name.

    >>> matching("--freeze", ["fc1.*"], ["fc1.weight", "fc1.bias", "fc2.weight"])
    ['fc1.weight', 'fc1.bias']
    """
    patterns, names = list(patterns), list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(
                f"{option} {pattern}: matches no parameter{hint} (parameters: {listed(names, joint=', ')})"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def frozen_names(option: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names of the parameters to freeze: those that match a pattern.

    Raises:
        InputError: a pattern matches no name, or the patterns together match every name.

    >>> frozen_names("--freeze", ["*"], ["weight", "bias"])
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: --freeze *: leaves no parameter to train
    """
    patterns, names = list(patterns), list(names)
    frozen = matching(option, patterns, names)
    if frozen and len(frozen) == len(names):
        raise InputError(f"{option} {' '.join(patterns)}: leaves no parameter to train")
    return frozen


def grouped_names(option: str, patterns: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each pattern's group; a name belongs to the first pattern that it matches.

    Raises:
        InputError: a pattern matches no name, or only names of earlier patterns; or no pattern matches a name.

    >>> grouped_names("groups", ["*.bias", "*"], ["fc.weight", "fc.bias"])
    {'*.bias': ['fc.bias'], '*': ['fc.weight']}
    """
    groups: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    names = list(names)
    for name in names:
        first = first_match(groups, name)
        if first is None:
            raise InputError(f"{option}: no pattern matches {name}; add '*' as the last")
        groups[first].append(name)
    for pattern, members in groups.items():
        if not members:
            matching(option, [pattern], names)
            raise InputError(f"{option} {pattern}: matches only parameters of patterns before it")
    return groups


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches a name; None if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
