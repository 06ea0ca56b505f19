"""Write what a segment computes as code, in the names of the reference: parameters, inputs, and results of layers."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forced.locate import Location
from jaxddp.parity.diagnosis.forced.segments import CONSTANT, Segment
from jaxddp.parity.diagnosis.forced.trees import NARROW, Description, Tree, difference, narrowest, operation
from jaxddp.parity.diagnosis.forward.calls import parameters_of
from jaxddp.parity.graph import ARGUMENT, Graph, Node
from jaxddp.parity.port.draws import shown_entry
from jaxddp.parity.user_code.functions import common_function

NAMES = {
    **{"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "logistic": "sigmoid", "select_n": "where"},
    **{"max": "maximum", "min": "minimum", "concatenate": "cat", "conv_general_dilated": "conv"},
}
MOVES = (  # that show nothing
    *("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "expand_dims", "stop_gradient"),
    *("contiguous", "view", "unsqueeze", "float", "double", "expand", "to", "detach", "clone"),
)
IDLE = ("mul", "div", "add", "sub", "select_n", "where", "reduce_sum", "sum", "mean")  # that may change nothing
SHORT = 2  # letters of a variable that says less than a layer, such as x and h2
MOST_BETWEEN = 3  # values between two segments that are written as one
MOST_NUMBERS = 4  # of a constant that is written as a list
MOST_ROUNDINGS = 4  # one after the other, in a value; measured: 2.0 in 300 layers in bfloat16
LONGEST = 160  # characters of one side
LONGEST_STATEMENT = 240  # characters of what both sides compute, with the words between
MOST_OF_CALL = 60  # characters of one side, if the other has nothing there


class Expressions:
    """Values of both programs as code.

    Args:
        location: the segments.
    """

    def __init__(self, location: Location):
        self._torch, self._jax, self._loss = location.torch, location.jax, location.loss
        alignment = location.alignment
        self._names: dict[int, str] = {}  # of the values of one place
        self._forced: dict[int, int] = {}  # what differs at this place
        self._trees = Tree(""), Tree("")  # of the port and the reference, there
        self._twins: dict[int, int] = {}
        for k, twin in (*alignment.twins.items(), *alignment.forced.items()):
            self._twins.setdefault(twin.jax, k)

    def sides(self, place: Sequence[Segment], longest: int = LONGEST) -> tuple[str, str]:
        """Return what the port and the reference compute in the segments of a place.

        Values that both have are written as a parameter, an entry of the batch, the user's variable, or the call that
        returns it: "linear(...)".

        Args:
            place: the segments.
            longest: characters of a side, above which the user's function stands for it.
        """
        self._names.clear()
        self._forced = {one.ends[1]: one.ends[0] for one in place}
        jax, torch = self._sides(place, longest)
        module = self._module(place)
        return (jax.replace(f"{module}.", ""), torch.replace(f"{module}.", "")) if module else (jax, torch)

    def of_arguments(self, place: Sequence[Segment], function: str) -> Statement:
        """Return which arguments of a function the port exchanges, or which one it gives in place of another."""
        self._names.clear()
        torch, jax = (self._leaf_of_torch(place[0].ends[0]), self._leaf_of_torch(self._twins[place[0].ends[1]]))
        if len(place) > 1:
            return Statement("arguments_exchanged", operands=(f"{torch}", f"{jax}"), function=function)
        return Statement("other_argument", jax=f"{jax}", torch=f"{torch}", function=function)

    def label(self, place: Sequence[Segment]) -> Description | None:
        """Return the one difference between what both sides compute in the segments of a place; None: it is more."""
        self.sides(place)
        call = "" if place[-1].call == ARGUMENT else self._loss.calls[place[-1].call].words
        return difference(*self._trees, call) or self._rounded(place)

    def _rounded(self, place: Sequence[Segment]) -> Description | None:
        """Return that the port rounds values to fewer bits, if no more than that can make the difference."""
        (t, j), order, dtype = place[-1].ends, place[-1].order, narrowest(*self._trees)
        torch, jax = self._torch[t].array, self._jax[j].array
        if not dtype or order is None or torch is None or jax is None:
            return None
        differences = np.abs(jax.astype(float).ravel()[order] - torch.ravel())
        if differences.max() > MOST_ROUNDINGS * NARROW[dtype] * np.abs(torch).max():
            return None
        return Description("few_bits", Statement("few_bits", dtype=dtype, of=f"{self._trees[1]}"))

    def in_place(self, place: Sequence[Segment]) -> Description | None:
        """Return which value, or number, the port has in place of one of torch, whatever makes that; None: of none."""
        (t, j), call = place[0].ends, place[0].call
        array = self._jax[j].array
        if len(place) > 1 or array is None or array.dtype.kind == "b" or not place[0].torch or call == ARGUMENT:
            return None
        is_number = not np.ptp(array)
        if place[0].jax and not is_number:
            return None
        self._names.clear()
        given = f"{array.flat[0] + 0.0:.6g}" if is_number else f"{self._leaf_of_jax(j)}"
        what = Statement(
            "other_operand", jax=given, torch=f"{self._leaf_of_torch(t)}", call=self._loss.calls[call].words
        )
        return Description("other_operand", what)

    def statement(self, place: Sequence[Segment]) -> tuple[Statement | None, tuple[str, str]]:
        """Return what both sides compute in the segments of a place, and for which call, and the code of each side.

        None: it is too long, also with a function's name in place of what it computes.
        """
        call = "" if place[-1].call == ARGUMENT else self._loss.calls[place[-1].call].words
        for longest in (LONGEST, 0):
            jax, torch = self.sides(place, longest)
            module = self._module(place)
            length = len(torch) + (len(jax) + 12 if jax != torch else 33)
            length += (len(call) + 5) * bool(call) + (len(module) + 4) * bool(module)
            if jax and torch and length <= LONGEST_STATEMENT:
                if jax == torch and not self._torch[place[-1].ends[0]].is_near(self._jax[place[-1].ends[1]]):
                    return Statement("made_otherwise", of=torch, call=call), (jax, torch)
                return Statement("expressions", jax=jax, torch=torch, call=call, module=module, by=""), (jax, torch)
        return None, ("", "")

    def _module(self, place: Sequence[Segment]) -> str:
        """Return the module that makes the next call."""
        return "" if place[-1].call == ARGUMENT else self._loss.calls[place[-1].call].module or ""

    def is_chain(self, place: Sequence[Segment]) -> bool:
        """Return whether each segment begins near the end of the one before."""
        for first, second in itertools.pairwise(place):
            of_call = [] if second.call == ARGUMENT else self._torch.outputs[second.call][:1]
            ends = second.ends[0], *of_call
            if not any(0 < len(self._between(self._torch, first.ends[0], end)) <= MOST_BETWEEN for end in ends):
                return False
        return True

    def _sides(self, place: Sequence[Segment], longest: int) -> tuple[str, str]:
        first, last = place[0], place[-1]
        t, j = last.ends
        inside_torch = {k for one in place for k in one.torch}
        inside_jax = {k for one in place for k in one.jax}
        if len(place) > 1 and not self._between(self._torch, first.ends[0], t):  # operands of one call
            t, j = last.joined or last.ends
        for one in place[: len(place) if t != last.ends[0] else -1]:
            inside_torch |= self._between(self._torch, one.ends[0], t)
            inside_jax |= self._between(self._jax, one.ends[1], j)
        self._trees = (
            self._tree(self._jax, j, inside_jax, self._leaf_of_jax),
            self._tree(self._torch, t, inside_torch, self._leaf_of_torch),
        )
        jax, torch = map(str, self._trees)
        if not (inside_jax and inside_torch):  # what one side has alone is often a call
            longest = min(longest, MOST_OF_CALL)
        longest = longest if max(len(jax), len(torch)) <= longest else 0  # both are said alike
        written = _written(jax, self._jax, j, inside_jax, longest)
        return written, _written(torch, self._torch, t, inside_torch, longest)

    def _between(self, graph: Graph, first: int, last: int) -> set[int]:
        """Return the values that are computed from a value, and from which another is; the last one, too."""
        later = graph.after(first, range(first, last + 1))
        return graph.before(last, later)

    def _tree(self, graph: Graph, index: int, inside: Collection[int], leaf: Callable[[int], Tree]) -> Tree:
        if index not in inside and not self._is_vague(graph, index):
            return leaf(index)
        node = graph[index]
        given = [self._tree(graph, k, inside, leaf) for k in node.inputs]
        if node.name in MOVES and given and self._only_moves(graph, index):
            return given[0]
        if node.name in IDLE and (kept := self._idle_operand(graph, index)) is not None:
            return given[node.inputs.index(kept)]
        if graph is self._torch:
            return self._call(index, given)
        numbers = [Tree(f"{x:.6g}") for x in node.numbers]
        return operation(node.name, _name(node), [*numbers[: node.leading], *given, *numbers[node.leading :]], index)

    def _is_vague(self, graph: Graph, index: int) -> bool:
        """Return whether the port computes a number such as 1, which torch may have anywhere."""
        node = graph[index]
        is_number = node.size == 1 and node.array is not None and node.array.dtype.kind in "fiu"
        return graph is self._jax and is_number and not node.is_telling and bool(node.inputs)

    def _only_moves(self, graph: Graph, index: int) -> bool:
        """Return whether a value has the same elements as its first input; a cast may round them."""
        node, source = graph[index], graph[graph[index].inputs[0]]
        return None in (node.moments, source.moments) or node.size != source.size or node.is_near(source)

    def _idle_operand(self, graph: Graph, index: int) -> int | None:
        """Return the operand that a value equals since all others are constants, as in 1 * x; None: there is none."""
        node = graph[index]
        others = {k for k in node.inputs if _is_constant(graph, k)}
        rest = [k for k in dict.fromkeys(node.inputs) if k not in others]
        return rest[0] if len(rest) == 1 and node.is_near(graph[rest[0]]) else None

    def _call(self, index: int, given: Sequence[Tree]) -> Tree:
        """Return a call of torch with its arguments, except for those that are the function's defaults."""
        number = self._torch[index].call
        call, trees = self._loss.calls[number], iter(given)
        defaults = parameters_of(call.function)
        arguments = [_argument(x, trees) for x in call.args]
        told = ((key, x) for key, x in call.kwargs.items() if x is not None)
        told = ((key, x) for key, x in told if isinstance(x, Tensor) or x != defaults.get(key))
        arguments += [Tree(f"{key}={_argument(x, trees)}", value=number) for key, x in told]
        return operation(call.name, call.name.rstrip("_"), arguments, index)

    def _leaf_of_torch(self, index: int) -> Tree:
        while (source := self._reshaped(index)) is not None:
            index = source
        return Tree(self._names.get(index) or self._named(index), value=index)

    def _reshaped(self, index: int) -> int | None:
        """Return the value of which a call has changed the shape, and nothing else; None: it is no such call."""
        node = self._torch[index]
        source = self._torch[node.inputs[0]] if len(node.inputs) == 1 else node
        if source is node or node.array is None or source.array is None or node.size != source.size:
            return None
        return node.inputs[0] if np.array_equal(node.array.ravel(), source.array.ravel()) else None

    def _named(self, index: int) -> str:
        """Name a value: by its parameter or entry of the batch, or the call that returns it; alike ones by number."""
        node = self._torch[index]
        taken = {*self._names.values()}
        if node.call == ARGUMENT:
            name = shown_entry(node.name)
        else:
            call, variable = self._loss.calls[node.call], self._loss.variables.get(index, "")
            of_module = f"{call.module}(...)" if call.module and self._is_last(node.call) else ""
            name = of_module or variable or f"{call.words}(...)"
            if len(variable) > SHORT and variable not in taken:
                name = variable
            name = next(x for n in count(1) if (x := _numbered(name, n)) not in taken)
        self._names[index] = name
        return name

    def _is_last(self, number: int) -> bool:
        """Return whether a call is the last one that its module makes."""
        module = self._loss.calls[number].module
        return not any(call.module == module for call in self._loss.calls[number + 1 :])

    def _leaf_of_jax(self, index: int) -> Tree:
        waiting = [index]
        while waiting:
            k = waiting.pop()
            if k in self._twins and self._forced.get(k) != self._twins[k]:
                return self._leaf_of_torch(self._twins[k])
            if self._jax[k].name in MOVES and self._jax[k].inputs and self._only_moves(self._jax, k):
                waiting += self._jax[k].inputs[:1]
        node, unknown = self._jax[index], -1 - index  # no value of torch
        if node.call == ARGUMENT and node.array is not None and node.name == CONSTANT and node.size <= MOST_NUMBERS:
            return Tree(f"{node.array.tolist()}", value=unknown)
        name = "".join(re.findall(r"[\w.]+", node.name)[-1:]) if node.call == ARGUMENT else f"{_name(node)}(...)"
        return Tree(name, value=unknown)


def _is_constant(graph: Graph, index: int) -> bool:
    """Return whether a value depends on no parameter and no entry of the batch."""
    before = graph.before(index, range(len(graph)))
    return all(graph[k].call != ARGUMENT or graph[k].name == CONSTANT for k in before)


def _numbered(name: str, number: int) -> str:
    """Return a name with a number, except for the first.

    >>> _numbered("linear(...)", 2), _numbered("x", 1)
    ('linear(... 2)', 'x')
    """
    if number == 1:
        return name
    return f"{name[:-1]} {number})" if name.endswith(")") else f"{name} {number}"


def _name(node: Node) -> str:
    if node.name == "convert_element_type" and node.array is not None:
        return str(node.array.dtype)
    return NAMES.get(node.name, node.name).rstrip("_")


def _argument(x: Any, trees: Iterator[Tree]) -> Tree:
    if isinstance(x, Tensor):
        return next(trees, Tree("..."))  # that whose shape a draw takes is no input
    if isinstance(x, tuple | list):
        return Tree(f"[{', '.join(str(_argument(one, trees)) for one in x)}]")
    if isinstance(x, Mapping):
        return Tree(f"{{{', '.join(str(_argument(one, trees)) for one in x.values())}}}")
    return Tree(f"{x:.6g}" if isinstance(x, float) else f"{x!r}")


def _written(text: str, graph: Graph, end: int, inside: Collection[int], longest: int) -> str:
    """Return an expression; in place of a long one the user's function that returns it, if there is one."""
    nodes = (graph[k] for k in inside if graph[k].name not in MOVES and not graph.moves[k])
    users = (graph[k] for k in _users(graph, end))
    chains, after = ([(x.line, *x.callers) for x in of if x.line is not None] for of in (nodes, users))
    function = common_function(chains, after) if len(text) > longest else ""
    return f"{function}(...)" if function else _short(text)


def _users(graph: Graph, index: int) -> Iterator[int]:
    """Yield the values that are computed from a value, however it has been moved before."""
    for k in graph.users[index]:
        yield from _users(graph, k) if graph[k].name in MOVES or graph.moves[k] else (k,)


def _short(text: str) -> str:
    """Return an expression without its outer parentheses; "": it is too long."""
    if text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1]
    return text if len(text) <= LONGEST else ""


def _closing(text: str) -> int:
    """Return the place of the parenthesis that closes the first character's."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place
    return -1
