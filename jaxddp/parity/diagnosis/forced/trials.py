"""Plant faults in a segment: its calls and the next one are made again, and must compute what the port does."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.parity.diagnosis.forced.forced_values import ForcedValues, made_by
from jaxddp.parity.diagnosis.forced.layouts import equal
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.segments import Segment
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import Stages
from jaxddp.parity.graph import ARGUMENT
from jaxddp.parity.operations import LARGE

RANKS = (0,)
OF_A_CALL = 1000  # elements that take as long as a call


class SegmentSubject:
    """Segments that are not forced, a `fit.Subject`: what the next calls compute, with faults planted.

    Its steps are the inputs of the programs.

    Args:
        location: all segments.
        segments: those that are explained; all others stay forced.
        values: for each of the inputs, the values.
    """

    ranks = RANKS

    def __init__(self, location: Location, segments: Sequence[Segment], values: Sequence[ForcedValues]):
        self.steps = len(values)
        self.segments = segments
        self._loss, self._torch = location.loss, location.torch
        self._forced = location.alignment.forced.keys() - {one.ends[0] for one in segments if one.inside}
        self._edited = location.alignment.edits
        self._values = values
        edges = {(k, call) for k, call in location.alignment.edges}
        self._edges = edges - {(one.ends[0], one.call) for one in segments if not one.inside}
        # A recurrent layer has the sites of a time step again in the next one.
        self._again = {(one.ends[0], made_by(location, one)) for one in location.segments}
        self._targets = [self._forced_ends(of_inputs) for of_inputs in values]
        self._sites = {self._loss.calls[number].site for number in self.every}

    @cached_property
    def every(self) -> list[int]:
        """Numbers of all calls."""
        return sorted(self._torch.outputs.keys() - {ARGUMENT})

    @cached_property
    def work(self) -> int:
        """Number of elements of the calls that a trial makes, a call's own time included."""
        first, last = min(self.inside, default=0), self.every[-1] if self._torch.end in self._ends else max(self.inside)
        made = [n for n in self.every if first <= n <= last]
        return sum(OF_A_CALL + sum(self._torch[k].size for k in self._torch.outputs[n]) for n in made) or 1

    @cached_property
    def inside(self) -> list[int]:
        """Numbers of the calls of segments, of those that move what these are given or end with, and the next ones."""
        indices = {k for one in self.segments for k in one.torch}
        given = {k for index in indices for k in self._torch[index].inputs}
        indices |= {k for one in self.segments for k in self._moved(one.ends[0])}
        indices |= {k for k in given if self._torch.moves[k]}
        found = {self._torch[k].call for k in indices} | {one.call for one in self.segments}
        return sorted(found - {ARGUMENT})

    def _moved(self, index: int) -> Iterator[int]:
        """Yield a value, and those from which calls have moved it."""
        yield index
        while len(inputs := self._torch[index].inputs) == 1 and self._torch.moves[index]:
            index = inputs[0]
            yield index

    @cached_property
    def _ends(self) -> list[int]:
        """Values that are compared: the results of the next calls, or the loss."""
        calls = {one.call for one in self.segments}
        if ARGUMENT in calls:
            return [self._torch.end]
        return [k for call in sorted(calls) for k in self._torch.outputs[call]]

    def _forced_ends(self, values: ForcedValues) -> dict[int, np.ndarray]:
        """Return what the next calls compute, if another segment begins with that."""
        found: dict[int, np.ndarray] = {}
        for call in {self._torch[k].call for k in self._ends if k in self._forced} - {ARGUMENT}:
            inputs = self._torch[self._torch.outputs[call][0]].inputs
            given = [values.edges.get((k, call), values.arrays[k]) for k in inputs]
            found |= dict(zip(self._torch.outputs[call], self._loss.called(call, given), strict=True))
        return found

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return what the port computes."""
        arrays = {**self._values[step].arrays, **self._targets[step]}
        values = {f"{k}": arrays[k] for k in self._ends}
        return {"values": _floats(values), "elsewhere": {"": np.zeros(1)}}

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return what the calls compute with faults planted; "elsewhere": the largest difference in all other uses."""
        edits = [item for item in items if isinstance(item, CallEdit)]
        sites = {site for edit in edits for site in edit.sites}
        touched = {number for number in self.every if self._loss.calls[number].site in sites}
        if not sites <= self._sites:
            raise ValueError("a call is none of the graph's")
        forced, chosen = self._values[step], touched.union(self.inside)
        arrays, changed, ends = dict(forced.arrays), set[int](), dict(self._targets[step])
        again = {(k, call) for k, call in self._again if call in touched}
        kept, edges = self._forced - {k for k, _ in again}, self._edges - again
        last = self.every[-1] if self._torch.end in self._ends else max(chosen)
        for number in self.every[self.every.index(min(chosen)) :]:
            if number > last:
                break
            outputs = self._torch.outputs[number]
            inputs = self._torch[outputs[0]].inputs
            if number not in chosen and changed.isdisjoint(inputs):
                continue
            site = self._loss.calls[number].site
            here = [edit for edit in edits if site in edit.sites] or self._kept(number)
            given = [forced.edges[k, number] if (k, number) in edges else arrays[k] for k in inputs]
            made = self._loss.called(number, given, here, self._loss.earlier(arrays, number))
            for k, array in zip(outputs, made, strict=True):
                if k in ends:
                    ends[k] = array
                elif k not in kept:
                    is_equal = array.shape == forced.arrays[k].shape and equal(array, forced.arrays[k])
                    arrays[k] = array
                    (changed.discard if is_equal else changed.add)(k)
        wrong = [k for k in changed.difference(self._ends) if any(self._torch[u].call > last for u in self._users(k))]
        elsewhere = max((_distance(arrays[k], forced.arrays[k]) for k in wrong), default=0.0)
        targets = {**forced.arrays, **self._targets[step]}
        values = {f"{k}": _like(ends.get(k, arrays[k]), targets[k]) for k in self._ends}
        return {"values": _floats(values), "elsewhere": {"": np.array([elsewhere])}}

    def _kept(self, number: int) -> Sequence[CallEdit]:
        """Return the edit by which another segment was found."""
        mine = any(one.call == number and one.edits for one in self.segments)
        return () if mine else self._edited.get(number, ())

    def _users(self, index: int) -> Sequence[int]:
        return self._torch.users[index]


def _like(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return an array, if it has the shape of the other one; else another one of that shape."""
    return x if x.shape == y.shape else np.asarray(y, np.float64) + (np.abs(y).max(initial=0.0) or 1.0)


def _floats(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that can be subtracted, without infinities."""
    return {k: x if x.dtype.kind == "c" else np.clip(x.astype(np.float64), -LARGE, LARGE) for k, x in values.items()}


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    if x.shape != y.shape:
        return 1.0
    return float(np.abs(np.asarray(x, np.float64) - y).max(initial=0.0) / (np.abs(y).max(initial=0.0) or 1.0))
