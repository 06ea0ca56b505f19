"""Mutants that are equivalent by hand: both expressions, which a test evaluates on 1,000 random inputs.

At most 20 of the 700; all others are proved in `equivalence`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST = 20


@dataclass(frozen=True)
class Equivalent:
    """A mutant whose edit changes no value.

    Attributes:
        why: why both expressions are equal, for all inputs that can occur.
        before, after: the edited expression and what replaces it, as functions of the same inputs.
        shapes: shapes of the inputs.
        low, high: bounds between which the inputs are drawn uniformly.
    """

    why: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = field(default=((),))
    low: float = -3.0
    high: float = 3.0


# Name of a mutant, as `Mutant.name` -> why it is equivalent.
EQUIVALENTS: dict[str, Equivalent] = {}
