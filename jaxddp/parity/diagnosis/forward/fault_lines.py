"""Lines of both programs at which a fault of the loss is."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxddp.parity.diagnosis.forced.lines import first_use
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit
from jaxddp.parity.diagnosis.forward.candidates import LEFT_OUT, LOOSE
from jaxddp.parity.diagnosis.forward.reading import NO_TRACE, LossSubject, Parting, Reading, parted_with, program_of
from jaxddp.parity.diagnosis.search.fit import Item
from jaxddp.parity.operations import Lines, Operation, Operations, Results, SourceLine, needed_by, origins, readings
from jaxddp.parity.user_code.stated import made_at

ORDERS = ("concatenate", "rev", "sort", "split", "stack", "transpose")
COPIES = ("tile", "broadcast_in_dim", "concatenate", "gather")  # what repeat and tile are made of
FOLLOWING = 8  # calls, from the one at fault, whose result the port may compute
GRADIENTS = ("gradient_stopped", "gradient_not_stopped")
# Edits of a call in the user's program, where it may be that of a layer; others are of the layer's options.
OF_CALLS = {*LEFT_OUT, *LOOSE, *GRADIENTS, "calls_left_out", "other_index", "other_expression"}


def lines_of_items(
    subject: LossSubject, reading: Reading, items: Sequence[Item], made: Mapping[str, SourceLine]
) -> tuple[Lines, ...]:
    """Return the lines of each fault, found with all others planted; without faults, those where the programs part.

    A fault of how micro-batches are combined has the lines that end the loss, an option those that make its layer.

    Args:
        subject: the loss.
        reading: the port's program.
        items: the faults.
        made: see `ModelEvidence`.
    """
    if not items:
        return (lines_of(parted_with(subject, reading, ())[1]),)
    patches = [item for item in items if isinstance(item, CallEdit)]
    found = []
    with_all = subject.calls(reading.step, reading.rank, patches, reads=True)
    for item in items:
        calls, parted = parted_with(subject, reading, tuple(other for other in patches if other is not item))
        if not isinstance(item, CallEdit):
            found.append(last_lines(parted))
        elif item.sites:
            lines, layer = _lines_of_edit(item, calls, parted, with_all)
            used = first_use(reading.graph, item.change.entry) if item.change.entry and reading.graph else None
            lines = Lines(used or lines.jax, lines.torch)
            found.append(lines if layer is None else of_layer(lines, layer, reading, made))
        else:
            found.append(Lines())
    return tuple(found)


def _lines_of_edit(
    item: CallEdit, calls: Sequence[Call], parted: Parting, with_all: Sequence[Call]
) -> tuple[Lines, Call | None]:
    """Return the lines of an edit, and the call if the fault is in what it calls.

    Args:
        item: the edit.
        calls, parted: the calls of the loss with all other faults planted, and where they part.
        with_all: the calls with all faults planted.
    """
    fault = item.change.fault
    sites = frozenset(item.change.also) if fault == "call_moved" and item.change.also else item.sites  # moved to there
    own = (k for k, call in enumerate(calls) if call.site in sites)
    index = next(itertools.chain(own, (k for k, call in enumerate(calls) if call.within in sites)))
    call = calls[index]
    outside = of_call = fault in OF_CALLS and call.within is None
    planted = program_of(with_all)
    place = next((k for k, one in enumerate(with_all) if one.site == call.site), None)
    after = [] if place is None else depending(planted, place)
    if fault == "call_added" or (
        fault in LEFT_OUT and not item.change.also and _is_used_on_line(parted.torch, index, call)
    ):
        after = []  # the port's line is the first that does more, or the one that uses the input
    lines = lines_of(parted, index, item.value, [planted[k] for k in after], outside)
    return lines, None if of_call else call


def of_layer(lines: Lines, call: Call, reading: Reading, made: Mapping[str, SourceLine]) -> Lines:
    """Return the lines that make a library's layer, which a call is in; if it is in none, the lines as they are."""
    if not call.module or call.module not in made:
        return lines
    jax = made_at(lines.jax, call.module.rpartition(".")[2])
    return Lines(jax if jax != lines.jax else of_model(lines, call, reading, made).jax, made[call.module])


def of_model(lines: Lines, call: Call, reading: Reading, made: Mapping[str, SourceLine]) -> Lines:
    """Return the lines with the one that returns the port's model, if a library calls the layer that a call is in."""
    in_loss = any(one.line == lines.jax and not one.callers for one in reading.program)
    is_given = call.module in made and not call.callers and in_loss  # as to `nn.Sequential`
    return Lines(reading.model if is_given and reading.model else lines.jax, lines.torch)


def _is_used_on_line(program: Operations, index: int, call: Call) -> bool:
    """Return whether the line of a call uses its result and does not make its inputs."""
    if call.within is not None:
        return True
    makers = {program[k].line for k in program[index].inputs}
    users = {one.line for one in program if index in one.inputs}
    return call.line in users and call.line not in makers


def lines_of(
    parted: Parting,
    index: int | None = None,
    number: float | None = None,
    planted: Sequence[Operation] = (),
    outside: bool = False,
) -> Lines:
    """Return the lines of a fault.

    Args:
        parted: where the programs part, with all other faults planted.
        index: torch's call that is at fault; None: the first that parts.
        number: the port's number, if the fault is a number.
        planted: the call with the fault planted in it, and the calls that depend on it.
        outside: the fault is in the user's call and not in what it calls, so that the port's line is no deeper in its
            functions than torch's.
    """
    if index is None:
        index = min(origins(parted.torch, parted.of_torch), default=None)
    return Lines(
        _line_of_jax(parted, index, number, planted, outside), None if index is None else parted.torch[index].line
    )


def _line_of_jax(
    parted: Parting, index: int | None, number: float | None, planted: Sequence[Operation], outside: bool
) -> SourceLine | None:
    """Return the port's line that has the number; else that of the likeliest operation."""
    call = None if index is None else parted.torch[index]
    alike = [] if call is None else _computing(parted, call, planted)
    region = [parted.jax[k] for k in parted.of_jax if parted.jax[k].line is not None]
    if number is not None:
        for one in (*alike, *(region if number not in NO_TRACE else ())):
            if any(math.isclose(x, y, rel_tol=1e-9) for x in one.numbers for y in readings(number)):
                return one.line
    one = next(_likely(parted, call, alike, region), None)
    return None if one is None else _no_deeper(one, call, parted) if outside and call is not None else one.line


def _likely(
    parted: Parting, call: Operation | None, alike: Sequence[Operation], region: Sequence[Operation]
) -> Iterator[Operation]:
    """Yield the port's operations that may be at fault.

    First those that compute what torch's call does with the fault planted; then those that part, the first that is
    given what both sides compute before the others; then those that do what torch's call does.
    """
    yield from alike
    known = {k for k in parted.of_jax if not set(parted.of_jax).intersection(parted.jax[k].inputs)}
    yield from (parted.jax[k] for k in sorted(known) if parted.jax[k].line is not None and parted.jax[k].inputs)
    yield from region
    yield from (one for one in parted.jax if call is not None and one.line and Results((one,)).has(call))


def _computing(parted: Parting, call: Operation, planted: Sequence[Operation]) -> list[Operation]:
    """Return the port's operations that compute what torch's call, or the next one possible, returns with the fault.

    For a fault that changes only an order, it is the last operation that changes one.
    """
    inside = {*parted.of_jax, *(k for index in parted.of_jax for k in parted.jax[index].inputs)}
    for one in planted[:FOLLOWING]:
        lined = [k for k, x in enumerate(parted.jax) if x.line is not None and x.results and one.results]
        alike = [k for k in lined if Results((parted.jax[k],)).has(one)]
        if one is planted[0] and Results((call,)).has(one):
            orders = COPIES if call.name == "repeat_interleave" else ORDERS
            return [parted.jax[k] for k in reversed(alike) if parted.jax[k].name in orders]
        for k in reversed(alike):  # an operation that passes a value on is given it
            inside |= {*parted.jax[k].inputs} if k in inside else set()
        if alike:
            return [parted.jax[k] for k in sorted(alike, key=lambda k: k not in inside)]
    return []


def _no_deeper(port: Operation, torch: Operation, parted: Parting) -> SourceLine | None:
    """Return the port's line, or that of a function's call if it is deeper in the user's functions than torch's.

    Depths count from the functions that end the losses.
    """
    ends = len(parted.jax[-1].callers) - len(parted.torch[-1].callers)
    return (port.line, *port.callers)[max(0, len(port.callers) - len(torch.callers) - ends)]


def depending(program: Operations, index: int) -> list[int]:
    """Return the indices of an operation and of all that depend on it, in the order of execution."""
    found = {index}
    for k in range(index + 1, len(program)):
        found |= {k} if found.intersection(program[k].inputs) else set()
    return sorted(found)


def last_lines(parted: Parting) -> Lines:
    """Return the lines that make the last number of each program, the loss; without a number, the last lines."""
    return Lines(*map(_last_line, (parted.jax, parted.torch)))


def _last_line(program: Operations) -> SourceLine | None:
    """Return the line of the last number on which a program's end depends."""
    needed = [program[k] for k in needed_by(program)]
    last = sorted((one for one in needed if one.line), key=lambda one: [x.size for x in one.results] == [1])[-1:]
    return last[0].line if last else None
