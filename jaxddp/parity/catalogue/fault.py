"""Entries of the catalogue of faults."""

from collections.abc import Callable
from typing import NamedTuple

from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer


class Known(NamedTuple):
    """Facts about a fault that was found, in addition to its name.

    Attributes:
        says: description of the fault, with its values.
        optimizer: the reference's optimizer, applied to the tensors that the fault names.
    """

    says: str
    optimizer: TorchOptimizer


class Fault(NamedTuple):
    """A kind of mistake.

    Attributes:
        title: mistake of the JAX side.
        fix: correct code or advice.
        thread: a public report of the fault, as owner/repository#number; "" if there is none.
        fix_of: returns the fix where it depends on the run, and "" where `fix` is right; None: `fix` is always right.
    """

    title: str
    fix: str
    thread: str = ""
    fix_of: Callable[[Known], str] | None = None

    def fix_for(self, known: Known | None) -> str:
        """Return the fix; `known` None: nothing is known about the run."""
        return (known and self.fix_of and self.fix_of(known)) or self.fix
