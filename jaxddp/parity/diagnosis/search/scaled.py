"""Faults whose number is a factor of the gradients."""

import math
from dataclasses import dataclass, replace
from typing import Self

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.deviation import Deviation
from jaxddp.parity.diagnosis.search.fit import Item


@dataclass(frozen=True, kw_only=True)
class Scaling(Item):
    """A fault that may multiply gradients by a number that is to be fitted.

    Attributes:
        known: what it is, without a fitted number; (): no fault, or one with a fitted number.
        what: what the number multiplies ("gradients").
        factor: the number; None: there is none.
        sizes: sizes of the batch, in words.
    """

    known: tuple[Deviation, ...] = ()
    what: str = ""
    factor: float | None = None
    sizes: tuple[tuple[int, str], ...] = ()

    @property
    def deviations(self) -> tuple[Deviation, ...]:
        """The fault, with the fitted factor."""
        return self.known if self.factor is None else (scaled(self.what, self.factor, dict(self.sizes)),)

    @property
    def reference(self) -> float | None:
        """Factor that changes nothing; None: no factor is fitted."""
        return None if self.factor is None else 1.0

    @property
    def start(self) -> float:
        """Initial factor of the fit."""
        return 2.0

    @property
    def value(self) -> float | None:
        """Factor; None: no factor is fitted."""
        return self.factor

    @property
    def times(self) -> float:
        """Factor, 1 if none is fitted."""
        return 1.0 if self.factor is None else self.factor

    @property
    def plausible(self) -> bool:
        """Return whether the factor, or its inverse, is an integer or has few digits, so that a programmer chose it.

        Other factors have other origins, such as the share of labels that are ignored.
        """
        factor = abs(self.times) or 1.0
        return any(math.isclose(x, float(f"{x:.3g}")) or math.isclose(x, round(x)) for x in (factor, 1 / factor))

    def at(self, value: float) -> Self:
        """Return the fault with another factor."""
        return replace(self, factor=value)
