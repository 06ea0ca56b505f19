"""Variables of the environment by which a launcher describes a run: all of them, or none."""

from collections.abc import Mapping, Sequence

from jaxddp.errors import InputError

Environment = Mapping[str, str]


class HalfSetError(InputError):
    """Some variables of a launcher are set and others are missing or empty: each process would train alone."""


def complete(launcher: str, environment: Environment, names: Sequence[str]) -> list[str] | None:
    """Return the values of a launcher's variables; None if none is set, not even to an empty text.

    Raises:
        HalfSetError: some are missing or empty.

    >>> complete("torchrun", {"RANK": "0", "WORLD_SIZE": ""}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
    Traceback (most recent call last):
    ...
    jaxddp.config.launcher.HalfSetError: RANK is set, WORLD_SIZE (empty), LOCAL_RANK not; \
set all of torchrun's variables, or none
    """
    if not environment.keys() & set(names):
        return None
    given = [name for name in names if environment.get(name, "").strip()]
    if len(given) < len(names):
        lacking = [name + " (empty)" * (name in environment) for name in names if name not in given]
        problem = f"{given[0]} is set, {', '.join(lacking)} not" if given else f"{', '.join(lacking)}: not set"
        raise HalfSetError(f"{problem}; set all of {launcher}'s variables, or none")
    return [environment[name] for name in names]


def number(name: str, text: str) -> int:
    """Return the value of a variable as an integer.

    Raises:
        InputError: it is not an integer of 0 or more.
    """
    if not is_number(text):
        raise InputError(f"{name} {text}: must be a number, at least 0")
    return int(text)


def is_number(text: str) -> bool:
    """Return whether a text is an integer of reasonable length; `int` refuses thousands of digits."""
    return text.isdecimal() and len(text) < 20
