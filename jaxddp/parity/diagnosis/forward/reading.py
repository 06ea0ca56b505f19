"""Read both programs of a loss, torch's calls and the port's equations: where they part, and their lines."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxddp.parity.diagnosis.forward.calls import Call, tensors_in
from jaxddp.parity.diagnosis.forward.edits import numbers_of
from jaxddp.parity.operations import Lines, Operation, Operations, Results, SourceLine, differing, origins, readings

NO_TRACE = (0.0, 1.0)  # numbers of a port that may leave no trace in its program: x + 0, 1 * x
MOST_NUMBERS = 24  # of the port that are tried in a place


@dataclass(frozen=True)
class Reading:
    """Program of the port, run on one micro-batch.

    Attributes:
        program: equations of the jax loss; (): they could not be read.
        step, rank: step (index into the evidence's steps) and rank whose first micro-batch they computed.
    """

    program: Operations
    step: int
    rank: int


def program_of(calls: Sequence[Call]) -> Operations:
    """Return the calls of a loss, recorded with their moments, as operations.

    >>> import torch
    >>> from jaxddp.parity.diagnosis.forward.sites import trace
    >>> calls = trace(torch.nn.ReLU(), lambda model, batch: {"loss": (2 * model(batch["x"])).sum()},
    ...     {"x": torch.ones(3)}, reads=True)
    >>> [(one.name, one.inputs, one.numbers) for one in program_of(calls)]
    [('relu', (), ()), ('mul', (0,), (2.0,)), ('sum', (1,), ())]
    """
    makers: dict[int, int] = {}
    operations = []
    opened = {call.within for call in calls}  # what they return, their inner calls make
    for index, call in enumerate(calls):
        given = tensors_in((call.args, call.kwargs))
        inputs = dict.fromkeys(makers[id(x)] for x in given if id(x) in makers)
        operations.append(Operation(call.name, tuple(inputs), tuple(numbers_of(call)), call.line, call.results))
        if call.site not in opened:
            makers |= {id(x): index for x in tensors_in(call.result)}
    return tuple(operations)


@dataclass(frozen=True)
class Parting:
    """Place where two programs of a loss part.

    Attributes:
        torch, jax: the programs.
        of_torch, of_jax: operations whose results the other program does not compute, and on which the loss depends.
    """

    torch: Operations
    jax: Operations
    of_torch: tuple[int, ...]
    of_jax: tuple[int, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that stand in the port's operations here and not in the reference's, as either may have made them."""
        there = {number for index in self.of_torch for one in self.torch[index].numbers for number in readings(one)}
        return tuple(x for x in self.all_numbers if not any(abs(x - y) <= 1e-9 * abs(x) for y in there))

    @property
    def all_numbers(self) -> tuple[float, ...]:
        """Numbers that stand in the port's operations here, whether the reference has them too or not."""
        return tuple(dict.fromkeys(number for index in self.of_jax for number in self.jax[index].numbers))

    @property
    def likely_numbers(self) -> list[float]:
        """Numbers to try: those, what Python may have made of them, and those that may leave no trace."""
        ways = zip(*map(readings, self.numbers), strict=False)
        first = itertools.islice(itertools.chain(*ways), MOST_NUMBERS)  # as they are first
        return [*dict.fromkeys((*first, *NO_TRACE))]

    @property
    def primitives(self) -> frozenset[str]:
        """Primitives of the port's operations here, and of those before them that only change an order."""
        before, waiting = set(self.of_jax), [*self.of_jax]
        while waiting:
            more = set(self.jax[waiting.pop()].inputs) - before
            before |= more
            waiting += more
        orders = {self.jax[index].name for index in before}.intersection(("rev", "sort"))
        return frozenset(orders | {self.jax[index].name for index in self.of_jax})


def parting(torch: Operations, jax: Operations) -> Parting:
    """Return where two programs part."""
    return Parting(torch, jax, tuple(differing(torch, jax)), tuple(differing(jax, torch)))


def lines_of(parted: Parting, index: int | None = None, number: float | None = None) -> Lines:
    """Return the lines of a fault.

    Args:
        parted: where the programs part, with all other faults planted.
        index: torch's call that is at fault; None: the first that parts.
        number: the port's number, if the fault is a number.
    """
    if index is None:
        index = min(origins(parted.torch, parted.of_torch), default=None)
    return Lines(_line_of_jax(parted, index, number), None if index is None else parted.torch[index].line)


def last_lines(parted: Parting) -> Lines:
    """Return the lines that end the loss."""
    of_jax, of_torch = (
        next((one.line for one in reversed(program) if one.line is not None), None)
        for program in (parted.jax, parted.torch)
    )
    return Lines(of_jax, of_torch)


def _line_of_jax(parted: Parting, index: int | None, number: float | None) -> SourceLine | None:
    """Return the port's line that has the number; else the first that parts, or one that does what torch's does."""
    region = [parted.jax[k] for k in parted.of_jax if parted.jax[k].line is not None]
    if number is not None:
        for one in region:
            if any(math.isclose(x, y, rel_tol=1e-9) for x in one.numbers for y in readings(number)):
                return one.line
    inside = set(parted.of_jax)
    for k in parted.of_jax:  # the first that is given what both sides compute
        one = parted.jax[k]
        if one.line is not None and one.inputs and not inside.intersection(one.inputs):
            return one.line
    if region:
        return region[0].line
    twins = () if index is None else parted.jax
    return next((one.line for one in twins if one.line and Results((one,)).has(parted.torch[index or 0])), None)
