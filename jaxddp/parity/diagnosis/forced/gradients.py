"""Find the faults of two programs that compute the same loss, and other gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxddp.parity.diagnosis.forced.align import PortValues, Twin
from jaxddp.parity.diagnosis.forced.causes import LocatedFault
from jaxddp.parity.diagnosis.forced.labels import Edits
from jaxddp.parity.diagnosis.forced.layouts import Layouts, equal
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import Lines, SegmentText, SourceLine

NEAR = 1e-10  # of cotangents, relative to the largest; measured: equal ones differ by up to 4e-14
MOST_FAULTS = 12
STOPPED, LET_THROUGH = "stop_gradient", "gradient_not_stopped"


def gradient_faults(loss: TorchGraph, jax: Graph, edits: Edits) -> list[LocatedFault]:
    """Return the faults that make the gradients of two programs of a loss differ.

    A value is at fault whose cotangent, the gradient of the loss with respect to it, differs, while those of all values
    that are computed from it are equal.

    Args:
        loss: torch's program.
        jax: the port's program, with cotangents.
        edits: faults that can be tried.
    """
    search = GradientSearch(loss, jax)
    every = [*edits.of_gradients()]
    for _ in range(MOST_FAULTS):
        origin = search.origin
        if origin is None:
            return search.faults
        search.explain(origin, every)
    return []


class GradientSearch:
    """Search for values whose cotangents differ first, from the loss backwards.

    Args:
        loss: torch's program.
        jax: the port's program, with cotangents.

    Attributes:
        faults: what was found.
    """

    def __init__(self, loss: TorchGraph, jax: Graph):
        self._loss, self._torch, self._jax = loss, loss.graph, jax
        port, trained = PortValues(jax, Layouts()), _with_gradients(jax)
        self._twins = {
            k: [*port.twins_of(node.array, trained)] if loss.has_gradient(k) else []
            for k, node in enumerate(self._torch)
            if _is_float(node.array)
        }
        self._planted: dict[int, tuple[CallEdit, ...]] = {}
        self._forced: dict[int, np.ndarray] = {}
        self._cotangents = loss.cotangents()
        self.faults: list[LocatedFault] = []

    @property
    def origin(self) -> int | None:
        """Index of the last value whose cotangent differs, and on which a parameter's depends; None: none differs."""
        region = self._differing(self._cotangents)
        return max((k for k in region if not self._is_unknown(k)), default=None)

    def explain(self, origin: int, every: Sequence[CallEdit]) -> None:
        """Add the fault of a value: the edit after which the fewest cotangents differ, or its cotangent is forced."""
        region = self._differing(self._cotangents)
        near = self._consumers(origin)
        best: tuple[int, CallEdit] | None = None
        for edit in every:
            if not any(self._site(number) in edit.sites for number in near):
                continue
            for tried in [edit] if edit.reference is None else self._fitted(edit, origin):
                found = self._with(tried)
                left = len(region) if found is None else len(self._differing(found))
                is_fitting = found is not None and self._is_equal(origin, found.get(origin))
                if is_fitting and left < len(region) and (best is None or (left, tried.tier) < (best[0], best[1].tier)):
                    best = left, tried
        if best is None:
            self._force(origin, near)
        else:
            self._plant(origin, best[1])

    def _plant(self, origin: int, edit: CallEdit) -> None:
        self._cotangents = self._with(edit) or self._cotangents
        self._planted = self._planted_with(edit)
        number = next(n for n in self._numbers(edit))
        text = self._text(origin, number, edit.change.fault)
        self.faults.append(LocatedFault((edit,), edit.change.fault, edit.says, text, self._loss.calls[number]))

    def _force(self, origin: int, near: Sequence[int]) -> None:
        self._forced[origin] = self._port_cotangent(self._twins[origin][-1], self._torch[origin].array.shape)
        self._cotangents = self._loss.cotangents(self._planted, self._forced)
        calls = dict.fromkeys(self._loss.calls[number].words for number in near)
        name = self._loss.variables.get(origin) or self._torch[origin].name
        says = f"another gradient of {name}, from {', '.join(calls)}"
        self.faults.append(LocatedFault((), "other_gradient", says, self._text(origin, near[0], "")))

    def _differing(self, cotangents: Mapping[int, np.ndarray]) -> set[int]:
        """Return the values whose cotangents differ or are unknown, from parameters that differ on."""
        found: set[int] = set()
        arguments = [k for k in self._torch.outputs[ARGUMENT] if self._loss.has_gradient(k)]
        waiting = [k for k in arguments if not self._is_equal(k, cotangents.get(k))]
        while waiting:
            k = waiting.pop()
            if k in found or not _is_float(self._torch[k].array):
                continue
            if self._is_unknown(k) or not self._is_equal(k, cotangents.get(k)):
                found.add(k)
                waiting += self._torch.users[k]
        return found

    def _is_unknown(self, index: int) -> bool:
        return not self._twins[index]

    def _is_equal(self, index: int, cotangent: np.ndarray | None) -> bool:
        """Return whether the port has a cotangent of an equal value."""
        shape = self._torch[index].array.shape
        mine = np.zeros(shape) if cotangent is None else cotangent
        is_argument = self._torch[index].call == ARGUMENT
        twins = [twin for twin in self._twins[index] if not is_argument or self._jax[twin.jax].call == ARGUMENT]
        return any(equal(mine, self._port_cotangent(twin, shape), NEAR) for twin in twins or self._twins[index])

    def _port_cotangent(self, twin: Twin, shape: tuple[int, ...]) -> np.ndarray:
        cotangent = self._jax[twin.jax].cotangent
        assert cotangent is not None, "a float has one"
        return cotangent.ravel()[twin.order].reshape(shape)

    def _consumers(self, origin: int) -> list[int]:
        """Return the calls that get a value, and those up to the next value that the port has."""
        found, waiting = list[int](), [origin]
        while waiting:
            for k in self._torch.users[waiting.pop()]:
                if self._torch[k].call not in found:
                    found.append(self._torch[k].call)
                    waiting += [k] if k not in self._twins or self._is_unknown(k) else []
        return found

    def _fitted(self, edit: CallEdit, origin: int) -> Iterator[CallEdit]:
        """Yield an edit with the numbers with which a cotangent becomes the port's."""
        ends = [self._with(replace(edit, value=value)) for value in (0.0, 1.0)]
        if None in ends:
            return
        shape = self._torch[origin].array.shape
        zero, one = ((end or {}).get(origin, np.zeros(shape)) for end in ends)
        change = (one - zero).ravel()
        for twin in self._twins[origin]:
            if change.any():
                factor = float(change @ (self._port_cotangent(twin, shape) - zero).ravel() / (change @ change))
                yield replace(edit, value=float(f"{factor:.9g}"), given=True)

    def _with(self, edit: CallEdit) -> dict[int, np.ndarray] | None:
        try:
            return self._loss.cotangents(self._planted_with(edit), self._forced)
        except IMPOSSIBLE:
            return None

    def _planted_with(self, edit: CallEdit) -> dict[int, tuple[CallEdit, ...]]:
        more = {number: (*self._planted.get(number, ()), edit) for number in self._numbers(edit)}
        return {**self._planted, **more}

    def _numbers(self, edit: CallEdit) -> list[int]:
        return [number for number, call in enumerate(self._loss.calls) if call.site in edit.sites]

    def _site(self, number: int) -> object:
        return self._loss.calls[number].site

    def _text(self, origin: int, number: int, fault: str) -> SegmentText:
        call = self._loss.calls[number]
        return SegmentText((), (call.words,), Lines(self._line_of_jax(origin, number, fault), call.line))

    def _line_of_jax(self, origin: int, number: int, fault: str) -> SourceLine | None:
        """Return the port's line that stops a gradient, or that uses the value where torch does."""
        twins = {twin.jax for twin in self._twins[origin]}
        stops = [self._jax[k].line for k in twins if self._jax[k].name == STOPPED]
        if stops and fault != LET_THROUGH:
            return stops[0]
        later = self._torch.outputs[number]
        while later and (set(later) <= {origin} or self._values_alike(later[0], origin)):
            later = self._torch.users[later[0]]
        lines = [self._jax[twin.jax].line for k in later for twin in self._twins.get(k, ())]
        return next((line for line in lines if line is not None), None)

    def _values_alike(self, index: int, origin: int) -> bool:
        return {twin.jax for twin in self._twins.get(index, ())} == {twin.jax for twin in self._twins[origin]}


def _with_gradients(graph: Graph) -> set[int]:
    """Return the values of the port that pass their gradient on to an argument."""
    found: set[int] = set()
    for k, node in enumerate(graph):
        if _is_float(node.array) and (node.call == ARGUMENT or not found.isdisjoint(node.inputs)):
            found |= {k} if node.name != STOPPED else set()
    return found


def _is_float(x: np.ndarray | None) -> bool:
    return x is not None and x.dtype.kind == "f"
