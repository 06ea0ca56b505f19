"""What the catalogue says about a fault."""

from collections.abc import Callable
from typing import NamedTuple

from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer


class Known(NamedTuple):
    """Facts about a fault that was found, beside its name.

    Attributes:
        says: the fault in words, with its values.
        optimizer: the reference's, which the fault's tensors are given to.
    """

    says: str
    optimizer: TorchOptimizer


class Fault(NamedTuple):
    """A kind of mistake.

    Attributes:
        title: what the JAX side does.
        fix: what it should do instead.
        thread: a public report of the fault, as owner/repository#number; "" if there is none.
        fix_of: returns the fix where it depends on the run, and "" where `fix` is right; None: `fix` is always right.
    """

    title: str
    fix: str
    thread: str = ""
    fix_of: Callable[[Known], str] | None = None

    def fix_for(self, known: Known | None) -> str:
        """Return what the port should do instead; `known` None: nothing is known of the run."""
        return (known and self.fix_of and self.fix_of(known)) or self.fix
