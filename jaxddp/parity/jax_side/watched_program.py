"""Programs that say of each operation at a user's line whether it returns one of its operands."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import linen, nnx
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from jaxddp.parity.idle_operations import (
    KNOWN,
    OPERATORS,
    SYNONYMS,
    Called,
    Calls,
    Kept,
    is_listed,
    numbers_of,
)
from jaxddp.parity.jax_side.equations import Reader, Value, body_of, lines_of, moments_of, shown
from jaxddp.parity.jax_side.excerpt_program import QUICKLY
from jaxddp.parity.jax_side.idle_numbers import NumbersOfLoss
from jaxddp.parity.operations import Moments, SourceLine, is_of_user
from jaxddp.parity.private_parts import FRAMES

BRANCHES = ("cond", "switch")
DROPOUT = "jaxddp dropout"
OPERATOR = re.compile(r"^operator_r?")
CHOOSING = (
    "abs",
    "max",
    "min",
    "clamp",
    "select_n",
    "cond",
    "mul",
    "div",
    "add",
    "sub",
    "jit",
    "custom_jvp_call",
    "name",
)


@dataclass(frozen=True)
class _Noted:
    """An operation at a user's line.

    Attributes:
        called: its function, numbers and line.
        kept: for each operand, whether the result equals it, traced.
        result: the traced result.
        repeats: number of leading axes of the result that are those of scans around the operation.
    """

    called: Called
    kept: tuple[Any, ...]
    result: Any
    repeats: int = 0

    @property
    def shown(self) -> Any:
        """Return what the program returns of the result; see `equations.shown`."""
        function = shown
        for _ in range(self.repeats):
            function = jax.vmap(function)
        return function(self.result)

    def moments(self, of_result: Any) -> tuple[Moments, ...]:
        """Return the moments of the result, of each turn of a scan by itself."""
        if not self.repeats:
            return (moments_of(of_result),)
        turns = math.prod(self.result.shape[: self.repeats])
        leaves = [np.asarray(x).reshape(turns, *np.shape(x)[self.repeats :]) for x in jax.tree.leaves(of_result)]
        structure = jax.tree.structure(of_result)
        return tuple(moments_of(jax.tree.unflatten(structure, [x[turn] for x in leaves])) for turn in range(turns))


@dataclass
class WatchedProgram:
    """A program whose operations are watched.

    Attributes:
        function: the program, of flat arguments: for each operation whether its result equals each of its operands,
            the results, and the program's own.
        noted: the operations, once the program is traced.
        structure: structure of the program's own result.
        numbers: the program's numbers, if it is a loss.
    """

    function: Any
    noted: list[_Noted]
    structure: Any
    numbers: NumbersOfLoss | None = None
    _first: bool = True

    def watch(self, arguments: Any, twins: bool) -> tuple[Calls, Calls]:
        """Run a loss; return its operations, if any is worth it, and the numbers without effect so far."""
        assert self.numbers is not None, "a loss"
        stated = {called: Kept(frozenset()) for called in self.numbers.idle.values()}
        self.numbers.change(jax.tree.leaves(arguments))
        stated |= {called: Kept(frozenset({0})) for called in self.numbers.idle.values()}
        wanted = twins or any(is_listed(one.called) for one in self.noted)
        return self(arguments)[0] if wanted and self.noted else {}, stated

    def __call__(self, arguments: Any) -> tuple[Calls, Any]:
        """Run the program; return its operations, with their results when it runs first, and its own result."""
        kept, results, own = self.function(*jax.tree.leaves(arguments))
        of_all: Any = [()] * len(self.noted)
        if self._first:
            of_all = [one.moments(x) for one, x in zip(self.noted, jax.device_get(results), strict=True)]
        self._first = False
        calls: Calls = {}
        for one, flags, moments in zip(self.noted, jax.device_get(kept), of_all, strict=True):
            operands = frozenset(k for k, flag in enumerate(flags) if flag)
            before = calls.get(one.called, Kept(operands))
            calls[one.called] = Kept(before.operands & operands, (*before.results, *moments))
        return calls, jax.tree.unflatten(self.structure, own)


def watched_program(
    function: Callable[..., Any], arguments: Any, replicas: int = 0, known: Collection[float] | None = None
) -> WatchedProgram:
    """Trace a function, and compile it such that its operations at the user's lines are watched.

    Args:
        function: function of arrays.
        arguments: trees of arrays.
        replicas: number of replicas that the program computes side by side; 0: it has no axis of them.
        known: see `NumbersOfLoss`; None: the function is no loss.
    """
    closed, returned = jax.make_jaxpr(function, return_shape=True)(*arguments)
    # What makes no result has no effect by intent, as metrics.
    closed = closed.replace(jaxpr=dce_jaxpr(closed.jaxpr, True, instantiate=True)[0])
    noted: list[_Noted] = []

    def run(*flat: jax.Array) -> Any:
        noted.clear()
        own = [x.array for x in Watcher(noted, replicas).read(closed, [Value(x) for x in flat])]
        return [one.kept for one in noted], [one.shown for one in noted], own

    compiled = jax.jit(run, compiler_options=QUICKLY)
    compiled.eval_shape(*jax.tree.leaves(arguments))  # notes the operations
    numbers = None if known is None else NumbersOfLoss(closed, known)
    return WatchedProgram(compiled, noted, jax.tree.structure(returned), numbers)


@contextmanager
def dropouts_shown() -> Iterator[None]:
    """Give dropout layers that return their input an equation."""

    def shown_by(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = call(self, inputs, *args, **kwargs)
            return checkpoint_name(outputs, DROPOUT) if outputs is inputs else outputs

        return called

    with ExitStack() as stack:
        for kind in (nnx.Dropout, linen.Dropout):
            stack.enter_context(mock.patch.object(kind, "__call__", shown_by(kind.__call__)))
        yield


class Watcher(Reader):
    """Reader that notes the operations at the user's lines which may return one of their operands.

    Args:
        noted: list to which they are appended.
        replicas: see `watched_program`; the results that are noted are those of the first replica.
    """

    def __init__(self, noted: list[_Noted], replicas: int = 0):
        super().__init__([])
        self._noted, self._replicas = noted, replicas

    def evaluate(
        self, program: Jaxpr, equation: JaxprEqn, given: list[Value], lines: tuple[SourceLine, ...]
    ) -> list[Value]:
        """Evaluate an equation, and note it."""
        name = equation.primitive.name
        if name == "scan":
            return self.scan(equation.params, given, lines)
        results = super().evaluate(program, equation, given, lines)
        backward = "transpose(" in str(equation.source_info.name_stack)
        # Derivatives choose by `select_n`, in no function; Python's `sum` begins with 0 + x.
        of_derivative = name == "select_n" and not library_function(equation)
        of_sum = name == "add" and given[0].number == 0 and not jnp.ndim(given[0].array)
        if name in CHOOSING and not (backward or of_derivative or of_sum) and (own := lines_of(equation)):
            function = called_function(equation)
            if name == "cond" and function in BRANCHES:
                taken = tuple(given[0].array == k for k in range(len(equation.params["branches"])))
                self._append(Called(function, (), own[0]), taken, results[0].array)
            elif function in KNOWN and (function not in BRANCHES or name == "select_n") and _is_library(equation):
                self._note(function, name, given, results[0].array, own[0])
        return results

    def scan(self, params: dict[str, Any], given: list[Value], lines: tuple[SourceLine, ...]) -> list[Value]:
        """Evaluate a scan as one, so that a long one is compiled as fast as a short one."""
        constants, carries = params["num_consts"], params["num_carry"]
        noted: list[_Noted] = []

        def body(carry: list[Any], of_step: list[Any]) -> Any:
            noted.clear()
            values = [*given[:constants], *map(Value, [*carry, *of_step])]
            results = [x.array for x in Watcher(noted, self._replicas).read(params["jaxpr"], values, lines)]
            return results[:carries], (results[carries:], [one.kept for one in noted], [one.result for one in noted])

        arrays = [x.array for x in given[constants:]]
        options = {"length": params["length"], "reverse": params["reverse"]}
        carry, (stacked, kept, results) = jax.lax.scan(body, arrays[:carries], arrays[carries:], **options)
        for one, flags, result in zip(noted, kept, results, strict=True):
            self._noted.append(_Noted(one.called, tuple(map(jnp.all, flags)), result, one.repeats + 1))
        return [*map(Value, [*carry, *stacked])]

    def _note(self, function: str, name: str, given: Sequence[Value], result: Any, line: SourceLine) -> None:
        chooses = name == "select_n" or function == "where"
        operands = given[1:] if chooses else given
        if name == "clamp":  # clamp(least, x, largest)
            operands = [given[1], given[0], given[2]]
        # An array of zeros is no number of an operator: it may be a state before the first step.
        stated = [x for x in operands if x.number is not None and not (function in OPERATORS and jnp.ndim(x.array))]
        called = Called(function, numbers_of(function, (x.number or 0.0 for x in stated)), line)
        if chooses:  # by the choice itself, since two branches of one value may have two gradients
            which, places = given[0].array.astype(int), range(len(operands))
            kept = tuple(jnp.all(which == place) for place in (places if name == "select_n" else reversed(places)))
        else:
            kept = tuple(_is_returned(x.array, result) for x in operands)
        self._append(called, kept, result)

    def _append(self, called: Called, kept: tuple[Any, ...], result: Any) -> None:
        of_all = bool(self._replicas) and result.shape[:1] == (self._replicas,)
        self._noted.append(_Noted(called, kept, result[0] if of_all else result))


def _is_library(equation: JaxprEqn) -> bool:
    """Return whether an equation is no function of the user's, and none that reduces an array to its extreme."""
    body = body_of(equation.params)
    inside = [] if body is None else body.jaxpr.eqns
    reduces = equation.primitive.name == "jit" and called_function(equation) in ("max", "min")
    return not reduces and not any(map(lines_of, inside))


def _is_returned(operand: Any, result: Any) -> Any:
    """Return whether a result equals an operand; NaN equals NaN."""
    if jnp.shape(operand) not in ((), result.shape, *(result.shape[k:] for k in range(result.ndim))):
        return jnp.asarray(False)
    return jnp.all((result == operand) | ((result != result) & (operand != operand)))


def library_function(equation: JaxprEqn) -> str:
    """Return the name of the library's function that the innermost user's line calls; "": it calls none."""
    traceback = equation.source_info.traceback
    frames: Any = [] if traceback is None else traceback.frames
    name = ""
    for frame in frames:  # the innermost first
        if is_of_user(frame.file_name):
            break
        if not any(module in frame.file_name for module in FRAMES):
            name = frame.function_name.rpartition(".")[2]
    return name


def called_function(equation: JaxprEqn) -> str:
    """Return the name of the function that the innermost user's line calls, as `KNOWN` has it."""
    if equation.primitive.name == "name":
        return "dropout" if equation.params["name"] == DROPOUT else ""
    name = (library_function(equation) or _name_of(equation)).strip("_")
    name = OPERATOR.sub("", name)
    return SYNONYMS.get(name, name)


def _name_of(equation: JaxprEqn) -> str:
    """Return the name of an equation, or of the function that it calls."""
    inner = equation.params.get("call_jaxpr")
    if equation.primitive.name == "custom_jvp_call" and inner is not None and inner.jaxpr.eqns:
        equation = inner.jaxpr.eqns[0]
    return str(equation.params.get("name", equation.primitive.name))
