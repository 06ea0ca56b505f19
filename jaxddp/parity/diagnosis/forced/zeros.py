"""Find what is 0 in the port: a value of torch, or those of a loop, whose place a 0 of the port takes."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxddp.parity.diagnosis.forced.align import Twin
from jaxddp.parity.diagnosis.forced.hits import State
from jaxddp.parity.diagnosis.forced.segments import Hit, Segment

MOST_ZEROS = 40  # values of torch, and loops, that may be 0 in the port
FEW = 8  # operations of a segment, with more of which one in a loop may say more


def vanished_in(state: State) -> Hit | None:
    """Return what is 0 in the port, if the losses are equal then; None: nothing is."""
    zeros = Zeros(state)
    if not zeros.of_port:
        return None
    single = (state.replayed(k, zero, len(state.torch)) for k, zero in itertools.islice(zeros, MOST_ZEROS))
    found = next((hit for hit in single if hit and not hit.left), None)
    if found is not None and len(found.segments[0].torch) <= FEW:
        return found
    loops = map(zeros.in_place_of, itertools.islice(_loops(state), MOST_ZEROS))
    return min(filter(None, loops), key=lambda hit: hit.strange + hit.cost, default=found)


def _loops(state: State) -> Iterator[list[int]]:
    """Yield the results of calls that are made several times, anywhere or at a line, some of which differ."""
    at_lines = defaultdict[object, list[int]](list)
    anywhere = defaultdict[object, list[int]](list)
    for number, call in enumerate(state.aligner.loss.calls):
        if len(state.torch.outputs[number]) == 1:
            at_lines[call.words, call.line, call.place] += state.torch.outputs[number]
            anywhere[call.words] += state.torch.outputs[number]
    for indices in dict.fromkeys(map(tuple, [*anywhere.values(), *at_lines.values()])):
        if len(indices) > 1 and not state.of_torch.isdisjoint(indices):
            yield [*indices]


class Zeros:
    """Values of the port that are 0, and may take the place of torch's.

    Args:
        state: both programs.

    Attributes:
        of_port: the values, which differ or are given to what does.
    """

    def __init__(self, state: State):
        self._state, self._torch, self._jax = state, state.torch, state.jax
        self.of_port = {k for k in state.before if state.jax[k].is_zero}

    def __iter__(self) -> Iterator[tuple[int, Twin]]:
        """Yield torch's values that differ, the largest and the last first, each with a 0."""
        differing = self._state.of_torch
        for index in sorted(differing, key=lambda k: (self._torch[k].size, k), reverse=True):
            if twin := self.like(index):
                yield index, twin

    def like(self, index: int) -> Twin | None:
        """Return the 0 that is made of what torch makes a value of; None: none can be it."""
        zeros = (twin for _, twin in self._state.candidates(index, self.of_port))
        return min(zeros, key=lambda twin: self.apart(index, twin), default=None)

    def apart(self, index: int, twin: Twin) -> int:
        """Return the number of values of which only one side makes a value; any 0 may be any other one."""
        state = self._state
        given = self._torch.border(self._torch.before(index, state.of_torch) | {index})
        of_jax = self._jax.border(state.before.get(twin.jax, set()) | {twin.jax})
        twins = [state.alignment.twins[k].jax for k in given if k in state.alignment.twins]
        inputs, others = ({k for k in of if not self._jax[k].is_zero} for of in (twins, of_jax))
        zeros = sum(not np.any(state.alignment.arrays[k]) for k in given), len(of_jax) - len(others)
        return len(inputs ^ others) + abs(zeros[0] - zeros[1])

    def in_place_of(self, indices: Sequence[int]) -> Hit | None:
        """Return a hit by 0 in the place of all of some values of torch, if the losses are equal then."""
        state = self._state
        values = [k for k in indices if np.any(state.alignment.arrays[k])]
        zeros = {k: twin for k in values if (twin := self.like(k)) is not None}
        if not zeros or len(zeros) < len(values):
            return None
        changed = state.alignment.copy()
        for k, twin in zeros.items():
            state.force(changed, k, twin)
        later = state.after(zeros) & state.of_torch
        if state.aligner.unequal(state.aligner.follow(changed))[0]:
            return None
        if not state.shows(changed, [k for k in later if np.any(changed.arrays[k])]):
            return None
        return _one_after_the_other(state, zeros)


def _one_after_the_other(state: State, zeros: Mapping[int, Twin]) -> Hit:
    """Return the hit by values of torch that are 0 in the port; each segment begins after the one before."""
    here, segments, apart = Zeros(state), list[Segment](), 0
    for k, first in zeros.items():
        twin = here.like(k) or first
        regions = state.torch.before(k, state.of_torch), state.before.get(twin.jax, ())
        of_torch, of_jax = (tuple(sorted(region)) for region in regions)
        segments.append(Segment(of_torch, of_jax, (k, twin.jax), None, True, twin.order, state.torch[k].call))
        apart += here.apart(k, twin)
        state = State(state.aligner, state.with_values(state.torch[k].call, {k: twin}, ()))
        here = Zeros(state)
    cost = max(len(segment.torch) for segment in segments)
    return Hit(tuple(segments), cost, apart, state.alignment, len(state.of_torch))
