"""Arguments of a user's function, or of a layer, that the port exchanges, or one of which it gives twice."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxddp.parity.diagnosis.forced.hits import EDIT, State
from jaxddp.parity.diagnosis.forced.segments import Hit, Segment, UserCall
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE
from jaxddp.parity.graph import Graph, calls_of
from jaxddp.parity.operations import Lines, SourceLine
from jaxddp.parity.user_code.functions import common_function

MOST_ARGUMENTS = 6  # values that a function is given, of which two are tried
Callers = tuple[SourceLine, ...]  # the line that calls a function, and those that call the functions around it


def other_arguments(state: State) -> Iterator[Hit | None]:
    """Yield, for each trial, the hit by arguments of a function that torch's program calls; small functions first."""
    torch, calls = state.torch, state.aligner.loss.calls
    differing = {*calls_of(torch, state.of_torch)}
    functions = _functions((number, calls[number].callers) for number in sorted(torch.outputs) if number in differing)
    for callers, numbers in functions:
        numbers = [n for n in sorted(torch.outputs) if n >= 0 and calls[n].callers[-len(callers) :] == callers]
        inputs = (k for number in numbers for k in torch[torch.outputs[number][0]].inputs)
        given = [k for k in dict.fromkeys(inputs) if torch[k].call not in numbers and _is_argument(state, k)]
        for pair in itertools.combinations(given, 2) if len(given) <= MOST_ARGUMENTS else ():
            first, second = pair
            for replaced in ({first: second, second: first}, {first: second}, {second: first}):
                yield _hit(state, callers, numbers, replaced)


def _functions(callers: Iterable[tuple[int, Callers]]) -> list[tuple[Callers, list[int]]]:
    """Return the functions in which some operations are, by the lines that call them, those with few of these first."""
    found: dict[Callers, list[int]] = defaultdict(list)
    for k, lines in callers:
        for depth in range(len(lines)):
            found[lines[depth:]].append(k)
    return sorted(found.items(), key=lambda one: len(one[1]))


def _is_argument(state: State, index: int) -> bool:
    """Return whether both sides have a value of floats, with a known layout."""
    twin, array = state.alignment.twins.get(index), state.torch[index].array
    is_known = index not in state.of_torch and twin is not None and twin.order is not None
    return is_known and array is not None and array.dtype.kind == "f"


def _hit(state: State, callers: Callers, numbers: Sequence[int], replaced: Mapping[int, int]) -> Hit | None:
    """Return the hit by values in place of others in some calls; None: no more is equal with these."""
    torch, twins, changed = state.torch, state.alignment.twins, state.alignment.copy()
    given = [(k, n) for n in numbers for k in torch[torch.outputs[n][0]].inputs if k in replaced]
    changed.edges |= {(k, n): replace(twins[replaced[k]], like=replaced[k]) for k, n in given}
    try:
        of_torch = state.aligner.unequal(state.aligner.follow(changed))[0]
    except IMPOSSIBLE:
        return None
    if len(of_torch) >= len(state.of_torch) or not state.follows(changed, of_torch, replaced):
        return None
    chains = [(call.line, *call.callers) for n in numbers if (call := state.aligner.loss.calls[n]).line is not None]
    line = calling_line(state.jax, [twins[k].jax for pair in replaced.items() for k in pair])
    user_call = UserCall(Lines(line, callers[0]), common_function(chains))
    segments = (
        Segment((), (), (k, twins[other].jax), inside=False, call=min(n for _, n in given), user_call=user_call)
        for k, other in replaced.items()
    )
    return Hit(tuple(segments), EDIT, 0, changed, len(of_torch))


def calling_line(graph: Graph, values: Collection[int]) -> SourceLine | None:
    """Return the line that calls the smallest function that is given some values; of none, the first that has one."""
    for callers, inside in _functions((k, node.callers) for k, node in enumerate(graph) if node.line is not None):
        if all(any(graph[k].is_near(graph[value]) for k in graph.border(inside)) for value in values):
            return callers[0]
    return next((graph[user].line for value in values for user in graph.users[value]), None)
