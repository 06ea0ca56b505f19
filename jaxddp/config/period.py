"""Time between two checkpoints, in epochs, optimizer steps or minutes."""

import re
from dataclasses import dataclass

from jaxddp.config.ranges import MOST, shortened
from jaxddp.errors import InputError

UNITS = ("epochs", "steps", "minutes")


@dataclass(frozen=True)
class Period:
    """Time between two events of a run.

    Attributes:
        count: number of units; 0: the event never comes.
        unit: one of `UNITS`.

    >>> Period.parse("--checkpoint-every", "200steps")
    Period(count=200, unit='steps')
    """

    count: float
    unit: str

    @classmethod
    def parse(cls, flag: str, value: int | str) -> "Period":
        """Parse a number of epochs, or a number with its unit; only minutes may have a fraction.

        Args:
            flag: name of the option, for the message.

        Raises:
            InputError: it is neither.

        >>> Period.parse("--checkpoint-every", "1 day")
        Traceback (most recent call last):
        ...
        jaxddp.errors.InputError: --checkpoint-every 1 day: must be like 5 (epochs), 5epochs, 200steps or 10minutes
        """
        match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?) ?(|epochs?|steps?|minutes?)", str(value), re.ASCII)
        unit = (match[2].rstrip("s") or "epoch") + "s" if match else ""
        if match is None or ("." in match[1] and unit != "minutes"):
            raise InputError(f"{flag} {value}: must be like 5 (epochs), 5epochs, 200steps or 10minutes")
        count = float(match[1])
        if not 0 <= count <= MOST:
            most = "least 0" if count < 0 else f"most {MOST}"
            raise InputError(f"{shortened(f'{flag} {value}')}: must be at {most}")
        return cls(count if "." in match[1] else int(match[1]), unit)

    def passed(self, unit: str, before: float, after: float) -> bool:
        """Return whether a multiple of this period lies after `before` and not after `after`.

        Args:
            unit: unit of `before` and `after`.

        >>> Period(5, "steps").passed("steps", 4, 11), Period(5, "steps").passed("steps", 5, 9)
        (True, False)
        """
        return unit == self.unit and self.count > 0 and before // self.count != after // self.count
