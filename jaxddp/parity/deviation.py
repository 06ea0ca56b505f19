"""What the port does in place of the reference, as data from which words, fixes and patches are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

DENOMINATOR = 1000  # largest one of a fraction that is written as one
LONG = 9  # digits of a number that is a fraction or root, and not a decimal fraction


@dataclass(frozen=True, init=False)
class Statement:
    """What is said, as data; `report.sentences` has the sentence of each form.

    Attributes:
        form: key of the sentence ("operand_left_out").
        parts: name -> what is filled in: names of tensors, layers and functions, numbers, code, other statements, or
            tuples of these.

    >>> Statement("gelu", by="tanh") == Statement("gelu").but(by="tanh")
    True
    """

    form: str
    parts: tuple[tuple[str, Any], ...] = ()

    def __init__(self, form: str, /, **parts: Any):
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "parts", tuple(parts.items()))

    def but(self, **parts: Any) -> "Statement":
        """Return the statement with further parts, or with others."""
        return Statement(self.form, **dict(self.parts) | parts)

    @property
    def of_any_layer(self) -> "Statement":
        """Return the statement without the numbers of layers.

        >>> Statement("operand", of="blocks.0.norm", by=(0.5, "0.5")).of_any_layer
        Statement(form='operand', parts=(('of', 'blocks.*.norm'), ('by', (0.5, '0.5'))))
        """
        return Statement(self.form, **{name: _of_any_layer(part) for name, part in self.parts})


def _of_any_layer(part: Any) -> Any:
    if isinstance(part, Statement):
        return part.of_any_layer
    if isinstance(part, tuple):
        return tuple(map(_of_any_layer, part))
    if isinstance(part, str) and part[:1].isidentifier():
        first, *others = part.split(".")
        return ".".join([first, *("*" if other.isdigit() else other for other in others)])
    return part


@dataclass(frozen=True)
class Value:
    """A value that differs.

    Attributes:
        jax, torch: the values as code ("0.2", "silu", "'same'"); "": a side has none.
        call, key: torch's call and its option ("leaky_relu", "negative_slope"), or what the value is of; "": unknown.
        is_factor: something is multiplied by the values; the reference's is 1 if it does not do so.
    """

    jax: str = ""
    torch: str = ""
    call: str = ""
    key: str = ""
    is_factor: bool = False


@dataclass(frozen=True)
class Deviation:
    """What the port does in place of the reference.

    Attributes:
        kind: name in the catalogue.
        what: what the port does, with the values.
        values: the values that differ; (): it has none.
        where: the layers that have it, as a pattern ("blocks.*.norm"), or the tensor; "": everywhere, or unknown.
        detail: what else the fix depends on, in a form that the catalogue knows for its kind.
        fix: what the port should do instead.
    """

    kind: str
    what: Statement
    values: tuple[Value, ...] = ()
    where: str = ""
    detail: str = ""
    fix: str = ""


class HasDeviations(Protocol):
    @property
    def deviations(self) -> tuple[Deviation, ...]: ...


class Deviating:
    """Names and statements of an object whose `deviations` are present at once."""

    @property
    def faults(self: HasDeviations) -> tuple[str, ...]:
        """Names in the catalogue."""
        return tuple(one.kind for one in self.deviations)

    @property
    def statements(self: HasDeviations) -> tuple[Statement, ...]:
        """Return what the deviations are, each once."""
        return tuple(dict.fromkeys(one.what for one in self.deviations))


def rounded(number: float, digits: int = 10) -> float:
    """Return a number with the digits of it that a sentence shows, so that numbers that read alike are equal.

    >>> rounded(0.1 + 1e-17), rounded(2 / 3, 4)
    (0.1, 0.6667)
    """
    return float(f"{number:.{digits}g}")


def first_names(names: Sequence[str], most: int = 3) -> str:
    """List names, the first few of many.

    >>> first_names(["a", "b", "c"]), first_names(["a", "b", "c", "d"])
    ('a, b, c', 'a, b, c and 1 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def number(value: float) -> str:
    """Format a number as a programmer would write it.

    >>> [number(x) for x in (0.0001, 1e-8, 2.0, 0.30000000000000004)]
    ['0.0001', '1e-8', '2', '0.3']
    """
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")


def as_code(number: float) -> str:
    """Write a number as code: with few digits, or as a fraction or a root of one, or with all of its digits.

    >>> [as_code(x) for x in (0.2, 1 / 3, -(0.125**0.5), 1e-5)]
    ['0.2', '1 / 3', '-0.125 ** 0.5', '1e-05']
    """
    number, short = float(number), f"{number:.10g}"
    if len(short.partition("e")[0].replace(".", "").lstrip("-0")) < LONG:
        return short
    ratio, square = (Fraction(x).limit_denominator(DENOMINATOR) for x in (number, number * number))
    if math.isclose(ratio, number, rel_tol=1e-9):
        return f"{ratio.numerator} / {ratio.denominator}"
    if math.isclose(square, number * number, rel_tol=1e-9):
        decimal, sign = f"{float(square):g}", "-" * (number < 0)
        return f"{sign}{decimal if float(decimal) == square else f'({square.numerator} / {square.denominator})'} ** 0.5"
    return repr(number)
