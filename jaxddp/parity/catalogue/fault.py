"""Entries of the catalogue of faults."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer
from jaxddp.parity.deviation import Deviation

FixOf = Callable[[Deviation, TorchOptimizer], str]


class Fault(NamedTuple):
    """A kind of mistake.

    Attributes:
        title: mistake of the JAX side.
        fix: correct code or advice.
        thread: a public report of the fault, as owner/repository#number; "" if there is none.
        fix_of: returns the fix where it depends on the run, and "" where `fix` is right; None: `fix` is always right.
        fixes: other fixes, by a deviation's `detail`.
    """

    title: str
    fix: str
    thread: str = ""
    fix_of: FixOf | None = None
    fixes: Mapping[str, str] = MappingProxyType({})

    def fix_for(self, deviation: Deviation, optimizer: TorchOptimizer | None = None) -> str:
        """Return the fix.

        Args:
            deviation: what a port with the fault does.
            optimizer: the reference's, which updates the tensors that the fault names; None: unknown.
        """
        made = self.fix_of(deviation, optimizer) if self.fix_of and optimizer else ""
        return made or self.fixes.get(deviation.detail, self.fix)
