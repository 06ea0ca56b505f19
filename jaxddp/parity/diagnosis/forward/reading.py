"""Read both programs of a loss, torch's calls and the port's equations: where they part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, tensors_in
from jaxddp.parity.diagnosis.forward.edits import numbers_of
from jaxddp.parity.diagnosis.search.fit import Subject
from jaxddp.parity.graph import Graph
from jaxddp.parity.operations import Operation, Operations, SourceLine, differing, needed_by, readings

NO_TRACE = (0.0, 1.0)  # numbers of a port that may leave no trace in its program: x + 0, 1 * x
SUMS = ("reduce_sum", "dot_general")  # primitives that add values up
MOST_NUMBERS = 24  # of the port that are tried in a place


@dataclass(frozen=True)
class Reading:
    """Program of the port, run on one micro-batch.

    Attributes:
        program: equations of the jax loss; (): they could not be read.
        step, rank: step (index into the evidence's steps) and rank whose first micro-batch they computed.
        model: the line that returns the port's model; None: unknown.
        graph: its values; None: unknown.
        varied: its values with parameters that are varied; see `value_graph.ReadGraphs`.
    """

    program: Operations
    step: int
    rank: int
    model: SourceLine | None = None
    graph: Graph | None = None
    varied: Mapping[str, Graph] = field(default_factory=dict)


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
        made, numbers = tuple(inputs), tuple(numbers_of(call))
        operations.append(Operation(call.name, made, numbers, call.line, call.results, call.callers))
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
        """Numbers in the port's operations here that the reference's cannot be, however either has computed them."""
        there = {number for index in self.of_torch for one in self.torch[index].numbers for number in readings(one)}
        return tuple(x for x in self.all_numbers if not any(abs(x - y) <= 1e-9 * abs(x) for y in there))

    @property
    def all_numbers(self) -> tuple[float, ...]:
        """Numbers in the port's operations here, whether the reference has them too or not."""
        return tuple(dict.fromkeys(number for index in self.of_jax for number in self.jax[index].numbers))

    @property
    def computes_zero(self) -> bool:
        """Return whether only the port's loss depends on a sum of values that is 0: a term that its values hide."""
        jax = any(_is_zero(self.jax[k]) and self.jax[k].name in SUMS for k in needed_by(self.jax))
        return jax and not any(_is_zero(self.torch[k]) for k in needed_by(self.torch))


def _is_zero(one: Operation) -> bool:
    """Return whether an operation computes the number 0."""
    return bool(one.inputs) and any(x.size == 1 and x.absolute == 0 for x in one.results)


def parting(torch: Operations, jax: Operations) -> Parting:
    """Return where two programs part."""
    return Parting(torch, jax, tuple(differing(torch, jax)), tuple(differing(jax, torch)))


class LossSubject(Subject, Protocol):
    """A subject whose calls can be recorded."""

    def calls(self, step: int, rank: int, patches: Sequence[CallEdit] = (), reads: bool = False) -> list[Call]:
        """Return the calls of the loss, with faults planted."""


def parted_with(subject: LossSubject, reading: Reading, known: tuple[CallEdit, ...]) -> tuple[list[Call], Parting]:
    """Return the calls of the loss with some faults planted, and where they part from the port's program."""
    calls = subject.calls(reading.step, reading.rank, known, reads=True)
    return calls, parting(program_of(calls), reading.program)
