"""Find the parts of a training loop that a run did not exercise, so that its agreement says nothing about them."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.compare.clipping import Clipping
from jaxddp.parity.records import Record, full_norm
from jaxddp.parity.sums import Summand


def idle(records: Sequence[Record], clipping: Clipping, summands: Sequence[Summand] = ()) -> Iterator[str]:
    """Yield a sentence on clipping that never acts, and one on tensors whose gradient is always 0.

    Args:
        records: the reference's steps.
        clipping: how the reference clips.
        summands: see `jaxddp.parity.sums`; the reference's records are folded.

    >>> steps = [{"gradients": {"dead.weight": np.zeros(2), "head.weight": np.ones(1)}}]
    >>> print(*idle(steps, Clipping(5.0)), sep="\\n")
    Clipping at 5 was not tested: the largest norm of the gradients is 1.
    All gradients of dead.weight are 0, so their layers were not tested.
    """
    if not len(records):
        return
    if (most := clipping.max_norm) is not None:
        norm = max(full_norm(record, "gradients") for record in records)
        if clipping.factor(norm) >= 1.0:
            yield f"Clipping at {most:g} was not tested: the largest norm of the gradients is {norm:.3g}."
    if (most := clipping.largest) is not None and not any(record.get("norms") for record in records):
        value = max(float(np.abs(x).max(initial=0.0)) for record in records for x in record["gradients"].values())
        if value <= most:
            yield f"Clipping at {most:g} was not tested: the largest element of the gradients is {value:.3g}."
    dead = set.intersection(*map(_of_zeros, records)) - {summand.other for summand in summands}
    if dead:
        names = listed(sorted(dead), joint=", ")
        yield f"All gradients of {names} are 0, so their layers were not tested."


def _of_zeros(record: Record) -> set[str]:
    """Return the tensors whose gradient is 0; for a large one, the record holds an excerpt and the norm."""
    norms = record.get("norms", {})
    gradients = record["gradients"].items()
    return {name for name, x in gradients if not (x.any() or np.any(norms.get(f"gradients:{name}", False)))}
