"""Faults that the diagnosis knows by name: what the JAX side does wrong, and the fix.

The `thread` of a fault is a public report of it. A port with one of these faults is reported as different, and
the fault is named if the reference, replayed with the same fault, reproduces what the port does.
"""

from jaxddp.parity.catalogue import data, model, optimizer, reduction
from jaxddp.parity.catalogue.edits import EDITS
from jaxddp.parity.catalogue.fault import Fault
from jaxddp.parity.catalogue.torch_optimizer import TorchOptimizer

__all__ = ["EDITS", "FAULTS", "Fault", "TorchOptimizer", "is_of_optimizer"]

FAULTS: dict[str, Fault] = {**reduction.FAULTS, **optimizer.FAULTS, **data.FAULTS, **model.FAULTS}


def is_of_optimizer(fault: str) -> bool:
    """Return whether a fault is in the optimizer or its schedule.

    >>> is_of_optimizer("decay_value"), is_of_optimizer("schedule"), is_of_optimizer("sum_not_mean")
    (True, True, False)
    """
    return fault in optimizer.FAULTS or fault == "schedule"
