"""Edits of the calls where two programs part: first those after which a call gives what the port computes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Name, Names, tensors_in
from jaxddp.parity.diagnosis.forward.edits import edits_of_arguments
from jaxddp.parity.diagnosis.forward.index_edits import shifts
from jaxddp.parity.diagnosis.forward.rewiring import edits_of_connections
from jaxddp.parity.diagnosis.forward.several_calls import inputs_moved
from jaxddp.parity.diagnosis.forward.sites import patches_of

PLAIN = 3  # highest tier of an edit that cannot replace many others
LEFT_OUT = ("call_left_out", "operand_left_out", "call_moved")  # edits after which a call returns an input
# Edits that can replace many others: if several of them do the same, none of them is likely to be what was written.
LOOSE = frozenset({"factor", "addend", "other_operand", "call_added", "call_moved"})


def with_numbers(patches: Iterable[CallEdit], numbers: Sequence[float]) -> Iterator[CallEdit]:
    """Yield the patches, those with a value also with each of the port's numbers that may be one."""
    for patch in patches:
        reference, least = patch.change.reference, patch.change.least
        if reference is not None:
            yield from (replace(patch, value=x, given=True) for x in numbers if x != reference and x >= least)
        yield patch


def edits_of_inputs(calls: Sequence[Call], names: Names, inputs: Mapping[int, str]) -> Iterator[CallEdit]:
    """Yield faults of how entries of the batch are taken: slices by another offset, an entry moved by one.

    Args:
        calls: the calls of the loss.
        names: id of a tensor -> what it is.
        inputs: id of an entry of the batch -> its name.
    """
    yield from shifts(calls, range(len(calls)), names)
    yield from patches_of(inputs_moved(calls, inputs))


def edits_of_layers(calls: Sequence[Call], names: Names) -> Iterator[CallEdit]:
    """Yield faults of calls that were opened, such as a recurrent layer that starts from zeros.

    Args:
        calls, names: see `edits_of_inputs`.
    """
    opened = {call.within for call in calls}
    chosen = [index for index, call in enumerate(calls) if call.site in opened]
    changes = [(calls[index], change) for index in chosen for change in edits_of_arguments(calls[index], names)]
    yield from patches_of([*changes, *edits_of_connections(calls, chosen, (), names)])


def names_of_all(calls: Sequence[Call], names: Names) -> dict[int, Name]:
    """Return what each tensor is: a parameter, or the result of a call."""
    results = {id(x): Statement("result", call=call.words) for call in calls for x in tensors_in(call.result)}
    return {**results, **names}
