"""Types of numbers that one side holds when it trains as written, before a check casts them. Imports neither framework.

Each side collects its own, and `jaxddp.parity.compare.types` compares them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jaxddp.parity.operations import SourceLine

# What has a type, in the order of the report: the name of several, the name of a single one.
KINDS = {
    "parameters": "parameter",
    "buffers": "buffer",
    "moments": "state of the optimizer",
    "inputs": "entry of the batch",
    "losses": "loss",
}


class HeldType(NamedTuple):
    """Type of an array, and the user's line that makes it; None: unknown."""

    dtype: str
    line: SourceLine | None = None


@dataclass
class HeldTypes:
    """Types that one side holds.

    Attributes:
        of: one of `KINDS` -> name -> type. Moments are called "mu:fc.weight", by this side's names.
        twins: pairs of the torch tensor and the jax array that hold the same values; jax's side only.
        left_out: one of `KINDS` -> why its types are not known.
        products: how the program declares that products of float32 matrices are computed, where hardware has a choice;
            "": it declares nothing.
        casts: dtypes of 16 bits in which the loss computes on this machine, or on another (autocast on GPUs).
        doubles: whether the loss asks for float64 by name; torch's side only.
        written: parameters that the loss of a flax.nnx module sets; jax's side only.
    """

    of: dict[str, dict[str, HeldType]] = field(default_factory=dict)
    twins: tuple[tuple[str, str], ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    products: str = ""
    casts: tuple[str, ...] = ()
    doubles: bool = False
    written: tuple[str, ...] = ()

    @contextlib.contextmanager
    def collecting(self, *kinds: str) -> Iterator[None]:
        """Note why kinds are not known, where the code in this context raises: the run of the port reports errors."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self.left_out |= {kind: why for kind in kinds if kind not in self.of}


def version_of(port: str) -> tuple[str, int]:
    """Return a port's name with the time at which its file was written; 0: it is no file.

    A module next to the file runs once in a process, and so does what it sets for all of jax or torch: this is kept by
    the port's version.
    """
    with contextlib.suppress(OSError):
        return port, Path(port).stat().st_mtime_ns
    return port, 0
