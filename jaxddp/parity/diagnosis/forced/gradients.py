"""Find the faults of two programs that compute the same loss, and other gradients."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxddp.parity.deviation import Statement, as_code
from jaxddp.parity.diagnosis.forced.align import PortValues, Twin
from jaxddp.parity.diagnosis.forced.causes import MOST_NAMES, LocatedFault
from jaxddp.parity.diagnosis.forced.labels import Edits
from jaxddp.parity.diagnosis.forced.layouts import Layouts, equal
from jaxddp.parity.diagnosis.forced.torch_graph import TorchGraph
from jaxddp.parity.diagnosis.forward.calls import CallEdit
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import ARGUMENT, Graph
from jaxddp.parity.operations import Lines, SegmentText, SourceLine
from jaxddp.parity.user_code.stated import renamed_at, stating

NEAR = 1e-10  # of cotangents, relative to the largest; measured: equal ones differ by up to 4e-14
MOST_FAULTS = 12
MOST_WITHIN = 100  # faults that are tried elsewhere than at the last value that differs
PRODUCTS = ("mul", "div")
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
        if not search.region:
            return search.faults
        if not search.explain(every):
            break
    return []


class GradientSearch:
    """Search for values whose cotangents differ first, from the loss backwards.

    Args:
        loss: torch's program.
        jax: the port's program, with cotangents.

    Attributes:
        faults: what was found.
        region: values whose cotangents differ or are unknown, from parameters that differ on.
    """

    def __init__(self, loss: TorchGraph, jax: Graph):
        self._loss, self._torch, self._jax = loss, loss.graph, jax
        self._port, trained = PortValues(jax, Layouts()), _with_gradients(jax)
        self._twins = {
            k: [*self._port.twins_of(node.array, trained)] if loss.has_gradient(k) else []
            for k, node in enumerate(self._torch)
            if _is_float(node.array)
        }
        self._planted: dict[int, tuple[CallEdit, ...]] = {}
        self._forced: dict[int, np.ndarray] = {}
        self.faults: list[LocatedFault] = []
        self.region = self._differing(loss.cotangents())

    def explain(self, every: Sequence[CallEdit]) -> bool:
        """Add the fault after which the fewest cotangents differ; without one, a cotangent is forced.

        Args:
            every: faults that are tried: first those of the last value that differs, then all.

        Returns:
            Whether fewer differ.
        """
        origin = max((k for k in self.region if self._twins[k]), default=None)
        if origin is None:
            return False
        consumers = self._consumers([origin])
        near = [edit for edit in every if self._touches(edit, consumers)]
        inside = self._consumers(self.region)
        within = [edit for edit in every if edit.reference is None and self._touches(edit, inside)]
        within.sort(key=lambda edit: edit.change.fault != LET_THROUGH)
        for edits, most in ((near, len(self.region)), (within[:MOST_WITHIN], len(self.region) // 2)):
            tried = [(len(left), edit.tier, edit, left) for edit in edits for edit, left in self._tried(edit, origin)]
            tried = [one for one in tried if one[0] < most]
            if tried:
                least = min(one[:2] for one in tried)
                best = [(edit, left) for *rank, edit, left in tried if (*rank,) == least][:MOST_NAMES]
                self._plant(origin, [edit for edit, _ in best])
                self.region = best[0][1]
                return True
        passing = [number for number in consumers if self._loss.passes_gradient(number)]
        return self._force(origin, (passing or consumers)[0])

    def _tried(self, edit: CallEdit, origin: int) -> Iterator[tuple[CallEdit, set[int]]]:
        """Yield an edit, with the numbers that fit a value's cotangent, and the values whose cotangents differ then."""
        for fitted in [edit] if edit.reference is None else self._fitted(edit, origin):
            if (found := self._with(fitted)) is not None:
                yield fitted, self._differing(found)

    def _plant(self, origin: int, edits: Sequence[CallEdit]) -> None:
        """Add a fault that one of several edits explains, and plant the first."""
        self._planted = self._planted_with(edits[0])
        fault, number = edits[0].change.fault, self._numbers(edits[0])[-1]
        text = self._text(origin, number, fault)
        if edits[0].value is not None and (line := self._line_with(origin, edits[0].value)):
            text = replace(text, lines=Lines(line, text.lines.torch))
        self.faults.append(LocatedFault((*edits,), fault, edits[0].statements[0], text, self._loss.calls[number]))

    def _force(self, origin: int, consumer: int) -> bool:
        """Force the cotangent of a value; return whether fewer differ then."""
        shape, before = self._torch[origin].array.shape, self._forced
        tried: list[tuple[set[int], dict[int, np.ndarray]]] = []
        for twin in self._twins[origin]:
            forced = {**before, origin: self._port_cotangent(twin, shape)}
            tried.append((self._differing(self._loss.cotangents(self._planted, forced)), forced))
        left, self._forced = min(tried, key=lambda one: len(one[0]))
        is_better, self.region = len(left) < len(self.region), left
        name = self._loss.variables.get(origin) or self._torch[origin].name
        what = Statement("other_gradient", of=name, call=self._loss.calls[consumer].words)
        self.faults.append(LocatedFault((), "other_gradient", what, self._text(origin, consumer, "")))
        return is_better

    def _touches(self, edit: CallEdit, numbers: Sequence[int]) -> bool:
        return any(self._loss.calls[number].site in edit.sites for number in numbers)

    def _differing(self, cotangents: Mapping[int, np.ndarray]) -> set[int]:
        """Return the values whose cotangents differ or are unknown, from parameters that differ on."""
        found: set[int] = set()
        arguments = [k for k in self._torch.outputs[ARGUMENT] if self._loss.has_gradient(k)]
        waiting = [k for k in arguments if not self._is_equal(k, cotangents.get(k))]
        while waiting:
            k = waiting.pop()
            if k in found or not _is_float(self._torch[k].array):
                continue
            if not self._twins[k] or not self._is_equal(k, cotangents.get(k)):
                found.add(k)
                waiting += self._torch.users[k]
        return found

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

    def _consumers(self, values: Iterable[int]) -> list[int]:
        """Return the calls that get some values, and those up to the next value that the port has."""
        found, waiting = list[int](), [*values]
        while waiting:
            for k in self._torch.users[waiting.pop()]:
                if self._torch[k].call not in found:
                    found.append(self._torch[k].call)
                    waiting += [] if self._twins.get(k) else [k]
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

    def _text(self, origin: int, number: int, fault: str) -> SegmentText:
        call = self._loss.calls[number]
        return SegmentText((), (call.words,), Lines(self._line_of_jax(origin, number, fault), call.line))

    def _line_of_jax(self, origin: int, number: int, fault: str) -> SourceLine | None:
        """Return the port's line that stops a gradient, or that uses the value where torch does."""
        equal_nodes = [self._jax[twin.jax] for twin in self._port.twins_of(self._torch[origin].array)]
        stops = [node.line for node in equal_nodes if node.name == STOPPED]
        if stops and fault != LET_THROUGH:
            return stops[0]
        later = self._torch.outputs[number]
        while later and (set(later) <= {origin} or self._values_alike(later[0], origin)):
            later = self._torch.users[later[0]]
        alike = [twin.jax for k in later for twin in self._port.twins_of(self._torch[k].array)]
        line = next((self._jax[k].line for k in reversed(alike) if self._jax[k].line is not None), None)
        made = next((node.line for node in equal_nodes if node.line is not None), None)
        other_name = renamed_at(made)
        return other_name if fault == LET_THROUGH and other_name != made else line

    def _line_with(self, origin: int, value: float) -> SourceLine | None:
        """Return the port's line that multiplies what it makes of a value by a number; None: none does."""
        made = [self._jax.after(twin.jax, range(len(self._jax))) for twin in self._twins[origin]]
        factors = [x for x in (value, 1 / value if value else value) if abs(x) != 1]
        products = (k for k in sorted(set().union(*made)) if self._jax[k].name in PRODUCTS)
        having = [k for k in products if any(np.isclose(x, factors, rtol=NEAR).any() for x in self._jax[k].numbers)]
        lines = [line for k in having if (line := self._jax[k].line) is not None]
        # A mean divides by its number of elements, which its line does not state.
        return next((line for x in factors if (line := stating(lines, as_code(x)))), lines[0] if lines else None)

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
