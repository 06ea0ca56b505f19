"""Which of the faults that were found torch's loss needs: the others are values that it leaves out later."""

from collections.abc import Sequence

from jaxddp.parity.diagnosis.forced.align import Aligner, Alignment
from jaxddp.parity.diagnosis.forced.layouts import equal
from jaxddp.parity.diagnosis.forced.segments import Segment

Fault = tuple[Segment, ...]  # its segments in all places


def needed_faults(aligner: Aligner, start: Alignment, forced: Alignment, found: Sequence[Fault]) -> list[Fault]:
    """Return the faults without which torch's loss is another one, given those before; all if there are none.

    Args:
        aligner: both programs.
        start: what the port has in place of torch's values without anything forced.
        forced: the same with all faults forced.
        found: the faults.

    Raises:
        One of `fit.IMPOSSIBLE`: a call cannot be made with some of the faults only.
    """
    end, needed, before = aligner.torch.end, list[Fault](), start
    calls = len(aligner.loss.calls)
    for segments in sorted(found, key=lambda of_fault: min(one.call % calls for one in of_fault)):  # the losses last
        after = _with(aligner, start, forced, [*needed, segments])
        if not equal(before.arrays[end], after.arrays[end]):
            needed, before = [*needed, segments], after
    return [one for one in found if one in needed] or [*found]


def _with(aligner: Aligner, start: Alignment, forced: Alignment, found: Sequence[Fault]) -> Alignment:
    """Return what the port has in place of torch's values if only some faults are forced."""
    segments = [one for of_fault in found for one in of_fault]
    ends, given = {one.ends[0] for one in segments}, {one.ends[0] for one in segments if one.user_call}
    own = {(one.ends[0], one.call) for one in segments}
    changed, numbers = start.copy(), {one.call for one in segments}
    changed.forced = {k: twin for k, twin in forced.forced.items() if k in ends}
    changed.edges = {(k, n): twin for (k, n), twin in forced.edges.items() if (k, n) in own or k in given}
    changed.edits = {n: edits for n, edits in forced.edits.items() if n in numbers}
    for k, twin in changed.forced.items():
        changed.arrays[k] = aligner.array(twin, aligner.torch[k].array)
        changed.twins.pop(k, None)
    return aligner.follow(changed, set(changed.edits))
