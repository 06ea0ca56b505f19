"""What the port does in place of the reference, as data from which words, fixes and patches are made."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

DENOMINATOR = 1000  # largest one of a fraction that is written as one
LONG = 9  # digits of a number that is a fraction or root, and not a decimal fraction


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
        says: one line, with the values ("weight decay 0.0001, the reference has 0.01").
        values: the values that differ; (): it has none.
        where: the layers that have it, as a pattern ("blocks.*.norm"), or the tensor; "": everywhere, or unknown.
        detail: what else the fix depends on, in a form that the catalogue knows for its kind.
        fix: what the port should do instead.
    """

    kind: str
    says: str
    values: tuple[Value, ...] = ()
    where: str = ""
    detail: str = ""
    fix: str = ""


class HasDeviations(Protocol):
    @property
    def deviations(self) -> tuple[Deviation, ...]: ...


class Deviating:
    """Names and words of an object whose `deviations` are present at once."""

    @property
    def faults(self: HasDeviations) -> tuple[str, ...]:
        """Names in the catalogue."""
        return tuple(one.kind for one in self.deviations)

    @property
    def says(self: HasDeviations) -> str:
        """What the deviations are, in a line."""
        return "; ".join(dict.fromkeys(one.says for one in self.deviations)) or "no fault"


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
