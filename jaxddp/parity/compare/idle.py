"""Find the parts of a training loop that a run did not exercise, so that its agreement says nothing about them."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.records import Record, full_norm


def idle(records: Sequence[Record], clip_grad_norm: float | None) -> Iterator[str]:
    """Yield a sentence on clipping that never acts, and one on tensors whose gradient is always 0.

    Args:
        records: the reference's steps.
        clip_grad_norm: largest norm of the gradients; None: they are not clipped.

    >>> steps = [{"gradients": {"dead.weight": np.zeros(2), "head.weight": np.ones(1)}}]
    >>> print(*idle(steps, 5.0), sep="\\n")
    Clipping at 5 was not tested: the largest norm of the gradients is 1.
    All gradients of dead.weight are 0, so their layers were not tested.
    """
    if not len(records):
        return
    if clip_grad_norm is not None:
        largest = max(full_norm(record, "gradients") for record in records)
        if Clipping(clip_grad_norm).factor(largest) >= 1.0:
            yield f"Clipping at {clip_grad_norm:g} was not tested: the largest norm of the gradients is {largest:.3g}."
    dead = set.intersection(*map(_of_zeros, records))
    if dead:
        names = listed(sorted(dead), joint=", ")
        yield f"All gradients of {names} are 0, so their layers were not tested."


def _of_zeros(record: Record) -> set[str]:
    """Return the tensors whose gradient is 0; for a large one, the record holds an excerpt and the norm."""
    norms = record.get("norms", {})
    gradients = record["gradients"].items()
    return {name for name, x in gradients if not (x.any() or np.any(norms.get(f"gradients:{name}", False)))}
