"""Lines of both programs at which a segment's fault is."""

import math
from collections.abc import Iterator, Sequence

from jaxddp.parity.diagnosis.forced.arguments import calling_line
from jaxddp.parity.diagnosis.forced.expressions import IDLE, MOVES, NAMES
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.segments import CONSTANT, Segment
from jaxddp.parity.diagnosis.forced.trees import INFIX
from jaxddp.parity.diagnosis.forward.calls import OF, Call, CallEdit
from jaxddp.parity.diagnosis.forward.reading import NO_TRACE
from jaxddp.parity.diagnosis.forward.rewiring import JOINS, SHAPES
from jaxddp.parity.graph import ARGUMENT, SLICE, Graph, Node
from jaxddp.parity.operations import Lines, SourceLine, readings
from jaxddp.parity.user_code.stated import alias_of, renamed_at, stating

LEFT_OUT = ("operand_left_out", "call_left_out", "calls_left_out")
OF_ARGUMENTS = ("number", "other_index", "other_axis", "other_option", "other_expression")  # of the first operation
WEIGHTED = ("cross_entropy", "nll_loss")  # the mean is their last operation
PARTS = ("slice", "split", "chunk", "unbind", "transpose", "flip", "rev")  # what others take of a value
JOINED = ("concatenate", "stack")
SPLITS = ("chunk", "split", "unbind")
LAYOUTS = ("transpose", "dot_general")
CHOICE = "where"  # call that takes one of two values
NEARBY = 40  # values before one, among which an equal one is looked for
FOLLOWING = 60  # values after a segment, among which the one with a number is looked for
PRODUCTS = ("@", "einsum", "linear", "tensordot", "conv")  # what may stand for each other


def lines_of(location: Location, place: Sequence[Segment]) -> Lines:
    """Return the lines of the segments of a place: the last ones, or those of what only one side has."""
    if place[0].user_call is not None:
        return place[0].user_call.lines
    lines, (t, j), jax = _lines_of(location, place), place[-1].ends, location.jax
    is_left_out = any(one.torch for one in place) and all(jax[k].name in MOVES for one in place for k in one.jax)
    idle = _line_of_idle(jax, j) if is_left_out else None
    if jax[j].is_zero and not jax[j].inputs and place[-1].joined:  # what the port uses may be another 0
        idle = _used(jax, j, place[-1].joined[1]).line
    return Lines(_line_of_zero(jax, j) or idle or lines.jax, _line_of_zero(location.torch, t) or lines.torch)


def _lines_of(location: Location, place: Sequence[Segment]) -> Lines:
    torch, jax = location.torch, location.jax
    next_of_torch, next_of_jax = place[-1].joined or place[-1].ends
    of_jax, of_torch = ([k for one in place for k in getattr(one, side)] for side in ("jax", "torch"))
    constant = place[-1].ends[1] if jax[place[-1].ends[1]].name == CONSTANT else next_of_jax
    lines = Lines(_last_line(jax, of_jax, constant), _last_line(torch, of_torch, next_of_torch))
    if jax[place[-1].ends[1]].is_spoiled:  # what follows from a NaN is one, too
        first = _first_line(jax, of_jax), _first_line(torch, of_torch)
        return Lines(first[0] or lines.jax, first[1] or lines.torch)
    if of_torch and not of_jax:
        return _of_call_left_out(location, place, torch[of_torch[-1]].call) or lines
    if of_jax and not of_torch:
        return Lines(lines.jax, _of_value_before(location, place, of_jax) or alias_of(lines.torch))
    return Lines(_of_further(jax, of_jax, torch, of_torch) or lines.jax, lines.torch)


def _line_of_zero(graph: Graph, index: int) -> SourceLine | None:
    """Return the line at which a value, all of whose elements are 0, is first 0; None: it is not, or begins so."""
    return _line_of_uniform(graph, index) if graph[index].is_zero else None


def _line_of_uniform(graph: Graph, index: int) -> SourceLine | None:
    """Return the line at which a value all of whose elements are one number is first that; None: it begins so."""
    if not graph[index].inputs:
        return None

    def earlier(k: int) -> bool:
        return bool(graph[k].inputs) and _number(graph[k]) == _number(graph[index]) is not None

    while (source := next(filter(earlier, graph[index].inputs), None)) is not None:
        index = source
    return graph[index].line


def _number(node: Node) -> float | None:
    """Return the number that all elements of a float are; None: they differ, or are unknown."""
    m = node.moments
    is_float = node.array is not None and node.array.dtype.kind == "f"
    return m.least if m is not None and is_float and m.finite and m.least == m.largest else None


def _line_of_idle(graph: Graph, index: int) -> SourceLine | None:
    """Return the line at which an operand that changes nothing is first 0; None: no operand is 0."""
    while graph[index].name in MOVES and graph[index].inputs:
        index = graph[index].inputs[0]
    lines = (_line_of_zero(graph, k) for k in graph[index].inputs)
    return next((line for line in lines if line is not None), None)


def lines_of_name(location: Location, place: Sequence[Segment], lines: Lines, call: Call, name: CallEdit) -> Lines:
    """Return the lines of a fault that has a name: torch's call, and the port's operation that has the number."""
    is_planted = any(one.edits and one.order is None for one in place)  # equal values follow only later
    is_of_shape = name.change.fault in LEFT_OUT and call.name in SHAPES  # the operation that broadcasts shows it
    if name.change.fault in LEFT_OUT and not is_planted and not is_of_shape:
        lines = _of_call_left_out(location, place, _number_of(location, call)) or lines
    if name.change.fault in LEFT_OUT and call.name == CHOICE:
        lines = Lines(_line_of_choice(location, call) or lines.jax, lines.torch)
    jax, value, twins = location.jax, name.value, location.alignment.twins
    indices = [k for one in place for k in (*one.jax, *(one.joined or one.ends)[1:])]
    is_of_mean = name.change.fault == "other_expression" and call.name in WEIGHTED
    if (name.change.fault in OF_ARGUMENTS and value is None and not is_of_mean) or is_of_shape:
        # The port's first operation has it.
        own = (jax[k] for k in indices if not jax.moves[k] and jax[k].name not in (*MOVES, SLICE))
        shown = (node.line for node in own if not (call.name == "dropout" and _is_mask(node)))
        lines = Lines(next((line for line in shown if line is not None), lines.jax), lines.torch)
    if value is not None and value not in NO_TRACE:
        is_own = any(not jax.moves[k] for one in place for k in one.jax)
        following = () if is_own else sorted(jax.after(place[-1].ends[1], range(len(jax))))[:FOLLOWING]
        having = (_line_with(jax[k], value) for k in (*indices, *following) if has_number(jax[k], value))
        lines = Lines(next((line for line in having if line is not None), lines.jax), lines.torch)
    if name.change.fault == "other_order" and call.name in JOINS and not any(jax[k].name in JOINED for k in indices):
        inputs = location.torch[location.torch.outputs[_number_of(location, call)][0]].inputs
        parts = [twins[k].jax for k in inputs if k in twins] or [*_own_arguments(location, inputs)]
        # Where a function is given them.
        lines = Lines((calling_line(jax, parts) if parts else None) or lines.jax, lines.torch)
    if name.change.fault == "other_order" and call.name in SPLITS and jax[place[-1].ends[1]].name in PARTS:
        lines = Lines(jax[place[-1].ends[1]].line or lines.jax, lines.torch)
    if name.change.what.form == "operand_transposed":
        lines = Lines(_line_of_layout(jax, place[-1].ends[1]) or lines.jax, lines.torch)
    if name.change.fault == "other_operand" and all(jax.moves[k] for one in place for k in one.jax):
        lines = Lines(_line_of_use(location, place[-1].ends[0]) or lines.jax, lines.torch)
    if name.change.entry:
        lines = Lines(first_use(jax, name.change.entry) or lines.jax, lines.torch)
    return Lines(lines.jax, call.line or lines.torch)


def _line_of_layout(graph: Graph, index: int) -> SourceLine | None:
    """Return the line that makes the layout of what a value is made of, of the same shape; None: it is an argument."""
    shape = graph[index].array.shape
    while graph[index].name not in LAYOUTS:
        given = (k for k in graph[index].inputs if graph[k].array is not None and graph[k].array.shape == shape)
        is_float = (k for k in given if graph[k].array.dtype.kind == "f")
        if (source := next(is_float, None)) is None:
            break
        index = source
    return graph[index].line


def _own_arguments(location: Location, indices: Sequence[int]) -> Iterator[int]:
    """Yield the port's arguments of which torch makes some values, each of one that the others are not made of."""
    of_jax = {shown_name(node.name): k for k, node in enumerate(location.jax) if node.call == ARGUMENT}
    own = (location.torch[k].name for k in location.torch.own_arguments(indices).values())
    yield from (of_jax[name] for name in own if name in of_jax)


def shown_name(path: str) -> str:
    """Return the name of an entry of the batch without its path: "[2]['words']"."""
    return path.rpartition("['")[2].removesuffix("']")


def _line_of_choice(location: Location, call: Call) -> SourceLine | None:
    """Return the port's line that takes what torch's program uses of a choice that is made several times."""
    torch, twins, calls = location.torch, location.alignment.twins, location.loss.calls
    last = max(n for n, one in enumerate(calls) if (one.name, one.line) == (call.name, call.line))
    chosen = torch.outputs[last][0]
    user = next((k for k in torch.users[chosen] if k in twins), None)
    return _used(location.jax, twins[chosen].jax, twins[user].jax).line if user and chosen in twins else None


def _line_of_use(location: Location, of_torch: int) -> SourceLine | None:
    """Return the port's line of the first operation that computes with a value of torch, or with what moves it."""
    torch, twins, waiting = location.torch, location.alignment.twins, [of_torch]
    while waiting:
        users = torch.users[waiting.pop(0)]
        computed = [k for k in users if not torch.moves[k]]
        if computed:
            return location.jax[twins[computed[0]].jax].line if computed[0] in twins else None
        waiting += users
    return None


def _number_of(location: Location, call: Call) -> int:
    return next(n for n, one in enumerate(location.loss.calls) if one is call)


def lines_of_trees(location: Location, lines: Lines, at: tuple[int | None, int | None]) -> Lines:
    """Return the lines of operations that alone differ, the port's and torch's; of none, those of their segment."""
    jax, torch = (
        None if k is None else graph[k].line for graph, k in zip((location.jax, location.torch), at, strict=True)
    )
    return Lines(jax or lines.jax, torch or lines.torch)


def _line_with(node: Node, value: float) -> SourceLine | None:
    """Return the line that states a number of an operation: its own, or one that gives a function the number."""
    every = () if node.line is None else (node.line, *node.callers)
    return stating(every, f"{value!r}") or node.line


def first_use(graph: Graph, entry: str) -> SourceLine | None:
    """Return the port's first line that uses an entry of the batch."""
    entries = (k for k, node in enumerate(graph) if node.call == ARGUMENT and node.name.endswith(f"[{entry!r}]"))
    lines = (graph[user].line for k in entries for user in graph.users[k])
    return next((line for line in lines if line is not None), None)


def has_number(node: Node, number: float) -> bool:
    """Return whether an operation computes with a number; one that only compares with it does something else."""
    return not _is_mask(node) and any(math.isclose(x, y, rel_tol=1e-9) for x in node.numbers for y in readings(number))


def _is_mask(node: Node) -> bool:
    return node.array is not None and node.array.dtype.kind == "b"


def _of_call_left_out(location: Location, place: Sequence[Segment], number: int) -> Lines | None:
    """Return the lines where the port would make a call: where it uses what the call is given, or where it makes that.

    It is the latter if the reference uses the call's result in another statement.
    """
    torch, jax, twins = location.torch, location.jax, location.alignment.twins
    node, later = torch[torch.outputs[number][0]], torch.users[torch.outputs[number][0]]
    in_place = [k for k in node.inputs if k in twins and twins[k].jax == place[-1].ends[1]]
    equal = [k for k in node.inputs if k in twins and torch[k].size == node.size]
    kept = in_place or [k for k in equal if jax[twins[k].jax].is_telling] or equal
    if not kept or not later:
        return None
    after, value = max((one.joined or one.ends)[1] for one in place), twins[kept[0]].jax
    if torch[later[0]].line != node.line:
        return Lines(renamed_at(_no_deeper(location, _used(jax, value, after), node)), node.line)
    is_joined = later[0] in (one.joined[0] for one in place if one.joined)  # its twin may be an equal value elsewhere
    following = twins[later[0]].jax if later[0] in twins and not is_joined else 0
    after = following if following > value else after
    user = _user(jax, value, after)
    if user is None and jax[value].name == SLICE:  # torch loops over what the port computes at once
        made = (k for k in sorted(torch.after(torch.outputs[number][0], range(len(torch)))) if k in twins)
        user = _user(jax, jax[value].inputs[0], next((twins[k].jax for k in made), after))
    if user is not None and (idle := _idle_before(jax, user, value)) is not None:
        return Lines(idle, node.line)
    if location.loss.calls[number].within is not None and len(node.inputs) == 1:  # the port's function is the layer
        return Lines(_of_layer(jax, value, user), node.line)
    return None if user is None or user.line is None else Lines(user.line, node.line)


def _idle_before(graph: Graph, user: Node, value: int) -> SourceLine | None:
    """Return the line of what does nothing to a value before it is used, as ones by which it is multiplied."""
    given = (graph[k] for k in user.inputs if k != value and graph[k].is_near(graph[value]))
    for node in (node for node in (user, *given) if node.name in IDLE):
        others = (k for k in node.inputs if _number(graph[k]) is not None)
        return next((line for k in others if (line := _line_of_uniform(graph, k))), node.line)
    return None


def _of_layer(graph: Graph, value: int, user: Node | None) -> SourceLine | None:
    """Return the line at which a function that is a layer is given a value, or one that it makes or returns is used."""
    given, users = graph[value], graph.users[value]
    user = user or (graph[users[-1]] if users else given)
    further = len(user.callers) - len(given.callers)
    return user.callers[further - 1] if further > 0 else user.line


def _used(graph: Graph, index: int, after: int) -> Node:
    """Return a value as another one uses it: of several that are equal, the one from which that is computed."""
    found = (given for of_level in _uses(graph, index, after) for _, given in of_level)
    return next((graph[k] for k in found if graph[k].name not in MOVES), graph[index])


def _user(graph: Graph, index: int, after: int) -> Node | None:
    """Return the operation that is given a value, and from which another one is computed by the fewest; of several,
    the last one.
    """
    nearest = next(filter(None, _uses(graph, index, after)), [])
    return graph[max(nearest)[0]] if nearest else None


def _uses(graph: Graph, index: int, after: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for growing numbers of operations before a value, those that are given one equal to another, and that."""
    level, seen = [after], {after}
    while level and len(seen) <= NEARBY:
        given = [(k, x) for k in level for x in graph[k].inputs]
        yield [(k, x) for k, x in given if graph[x].is_near(graph[index])]
        level = [*dict.fromkeys(x for _, x in given if x not in seen)]
        seen |= {*level}


def _no_deeper(location: Location, node: Node, call: Node) -> SourceLine | None:
    """Return the line of a value of the port, or of a function's call if it is deeper in these than torch's call.

    Depths count from the functions that end the losses.
    """
    jax, torch = (
        next(len(x.callers) for x in of[: of.end + 1][::-1] if x.line is not None)
        for of in (location.jax, location.torch)
    )
    return (node.line, *node.callers)[max(0, len(node.callers) - jax - (len(call.callers) - torch))]


def _of_value_before(location: Location, place: Sequence[Segment], of_jax: Sequence[int]) -> SourceLine | None:
    """Return torch's line of the value to which the port does more, if it does so in the statement that makes it."""
    jax, (t, _), (_, after) = location.jax, place[-1].ends, place[-1].joined or place[-1].ends
    first = next((jax[k] for k in of_jax if not jax.moves[k]), jax[of_jax[0]])
    makers = {jax[k].line for k in first.inputs if jax[k].call != ARGUMENT}
    is_there = first.line is not None and first.line in makers and first.line != jax[after].line
    return location.torch[t].line if is_there else None


def _of_further(graph: Graph, indices: Sequence[int], other: Graph, of_other: Sequence[int]) -> SourceLine | None:
    """Return the line of the operations that only one side has, if the other has none of these, and they are in one."""
    mine, theirs = (
        {k: _word(x[k]) for k in of if x[k].name not in MOVES and not x.moves[k]}
        for x, of in ((graph, indices), (other, of_other))
    )
    further = {graph[k].line for k, word in mine.items() if word not in theirs.values()}
    is_all = len(mine) == sum(word not in theirs.values() for word in mine.values())
    if is_all or len(further) != 1 or {*theirs.values()} - {*mine.values()}:
        return None
    return further.pop()


def _word(node: Node) -> str:
    """Return what an operation is called on both sides."""
    word = INFIX.get(node.name) or NAMES.get(node.name, node.name)
    return PRODUCTS[0] if word in PRODUCTS else word


def _is_part(node: Node) -> bool:
    return node.name.partition(OF)[0] in (*MOVES, *PARTS)


def _first_line(graph: Graph, indices: Sequence[int]) -> SourceLine | None:
    return next((graph[k].line for k in indices if graph[k].line is not None), None)


def _last_line(graph: Graph, indices: Sequence[int], after: int) -> SourceLine | None:
    """Return the line of the last of some values that is no part of another; of none, that of a value after them."""
    shown = [k for k in indices if graph[k].line is not None]
    computed = [k for k in shown if not graph.moves[k] and not _is_part(graph[k])] or shown
    lines = [graph[k].line for k in computed] or [graph[after].line]
    users = (graph[k].line for k in graph.users[after])
    return lines[-1] or next((line for line in users if line is not None), None)
