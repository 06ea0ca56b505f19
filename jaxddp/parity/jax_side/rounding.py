"""Lines of a port's loss at which float32 loses more than the reference does: found by computing them more exactly."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.parity.case_interface import AnyCase, Trajectory, micro_batches_of
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.equations import Evaluate, Reader, Value, evaluated
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.jax_side.widened import CASTS
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.pool import torch_records

MOST_LINES = 200  # that are tried one by one
CONTROL = ("scan", "while", "cond")
FLOAT32, FLOAT64 = jnp.dtype("float32"), jnp.dtype("float64")
KEYS = {primitive.name: key for primitive, key in CASTS.items()}
Lines = frozenset[SourceLine]
Distance = Callable[[Lines], float]


class RoundedLines(NamedTuple):
    """Lines that lose digits.

    Attributes:
        dtypes: line -> the dtype narrower than float32 that it rounds to; "float32" if it only computes in float32.
        before: distance of the gradients from those in float64, over their norm.
        after: the same with these lines computed in float64, and their results in float32.
    """

    dtypes: dict[SourceLine, str]
    before: float
    after: float


@dataclass(frozen=True)
class FindRounding:
    """A job that finds the lines of a loss in float32 that move its gradients away from those in float64.

    Attributes:
        case: model or port, in float64.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        step, rank: step (from 0) and rank whose first micro-batch is the input.
        allowed: largest distance that counts as float32's.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    step: int
    rank: int
    allowed: float

    def run(self, tell: Tell) -> RoundedLines | None:
        """Find the lines; None if no lines explain the distance."""
        tell("the lines that round")
        with jax.enable_x64(True):
            exact = _gradients_in_float64(side_of(self.case), self)
        rounded = side_of(self.case.with_dtype("float32"))
        params, buffers, batch = self._arguments(rounded)
        closed = _traced(rounded, params, buffers, batch)
        flat = jax.tree.leaves((params, buffers, batch))
        count = len(jax.tree.leaves(params))

        def distance(lines: Lines) -> float:
            loss = _loss_of(closed, _computing(lines), flat[count:])
            with jax.enable_x64(True):
                gradients = jax.grad(loss)(flat[:count])
            return _distance(jax.tree.leaves(gradients), jax.tree.leaves(exact))

        return search(narrowing(closed), distance, self.allowed)

    def _arguments(self, side: JaxSide) -> tuple[Any, Any, Any]:
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        batch = micro_batches_of(next(islice(self.case.batches(), self.step, None)), self.rank)[0]
        return *side.from_torch(reference.before(self.step)), jax.tree.map(jnp.asarray, batch)


def search(dtypes: dict[SourceLine, str], distance: Distance, allowed: float) -> RoundedLines | None:
    """Find few lines whose exact computation brings the distance down to what is allowed.

    Args:
        dtypes: every line -> the narrowest dtype that it rounds to.
        distance: distance with some lines computed exactly.
        allowed: largest distance that counts as float32's.

    >>> first, second, third = (SourceLine("model.py", number) for number in (1, 2, 3))
    >>> found = search({first: "float32", second: "bfloat16", third: "float32"}, lambda lines: 1e-7 if second in lines
    ...     else 1e-3, 1e-6)
    >>> [str(line) for line in found.dtypes], found.after
    (['model.py:2'], 1e-07)
    """
    before = distance(frozenset())
    narrow = frozenset(line for line, dtype in dtypes.items() if dtype != FLOAT32.name)
    for some in (narrow, frozenset(dtypes)):
        if not some or len(some) > MOST_LINES or not distance(some) <= allowed < before:
            continue
        alone = {line: distance(frozenset({line})) for line in some}
        chosen: Lines = frozenset()
        for line in sorted(some, key=alone.__getitem__):
            chosen |= {line}
            if distance(chosen) <= allowed:
                break
        for line in sorted(chosen, key=alone.__getitem__, reverse=True):
            if distance(chosen - {line}) <= allowed:
                chosen -= {line}
        return RoundedLines({x: dtypes[x] for x in dtypes if x in chosen}, before, distance(chosen))
    return None


def narrowing(closed: ClosedJaxpr) -> dict[SourceLine, str]:
    """Return each of the user's lines that computes floats, with the narrowest dtype that it rounds wider floats to."""
    found: dict[SourceLine, str] = {}

    def note(program: Jaxpr, equation: JaxprEqn, arrays: Sequence[Any], line: SourceLine | None) -> Any:
        given, made = map(_floats, (equation.invars, equation.outvars))
        if line is not None and made:
            known = jnp.dtype(found.setdefault(line, FLOAT32.name))
            least = min(made, key=lambda dtype: dtype.itemsize)
            rounds = any(dtype.itemsize > least.itemsize for dtype in given)
            if rounds and least.itemsize < known.itemsize:
                found[line] = least.name
        return evaluated(program, equation, arrays, line)

    jax.eval_shape(lambda flat: _run(closed, note, flat), [jnp.zeros(x.shape, x.dtype) for x in closed.in_avals])
    return found


def _floats(variables: Any) -> list[Any]:
    return [dtype for dtype in _dtypes(variables) if jnp.issubdtype(dtype, jnp.floating)]


def _dtypes(variables: Any) -> list[Any]:
    return [jnp.dtype(x.aval.dtype) for x in variables]


def _run(closed: ClosedJaxpr, evaluate: Evaluate, flat: Sequence[Any]) -> Any:
    return Reader([], evaluate).read(closed, [Value(x) for x in flat])[0].array


def _traced(side: JaxSide, params: Any, buffers: Any, batch: Any) -> ClosedJaxpr:
    """Return the loss of a single replica as a program of flat arguments."""
    step: Any = side.replica_step

    def loss(params: Any, buffers: Any, batch: Any) -> jax.Array:
        def of_replica(_: jax.Array) -> jax.Array:
            sums: dict[str, jax.Array] = step.loss(params, buffers, batch)[0]
            return sums["loss"]

        return jax.vmap(of_replica, axis_name=AXIS_NAME)(jnp.zeros(1)).sum()

    return jax.make_jaxpr(loss)(params, buffers, batch)


def _gradients_in_float64(side: JaxSide, job: FindRounding) -> Any:
    params, buffers, batch = job._arguments(side)
    with side.lifting():
        closed = _traced(side, params, buffers, batch)
    return jax.grad(_loss_of(closed, evaluated, jax.tree.leaves((buffers, batch))))(jax.tree.leaves(params))


def _loss_of(closed: ClosedJaxpr, evaluate: Evaluate, others: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda params: _run(closed, evaluate, [*params, *others])


def _computing(lines: Collection[SourceLine]) -> Evaluate:
    """Return a function that computes the equations of some lines in float64; others take their results in float32."""

    def evaluate(program: Jaxpr, equation: JaxprEqn, arrays: Sequence[Any], line: SourceLine | None) -> Any:
        name, params = equation.primitive.name, dict(equation.params)
        traced = _dtypes(equation.invars)
        if name in CONTROL:  # as it was traced
            arrays = [x.astype(dtype) for x, dtype in zip(arrays, traced, strict=True)]
            return evaluated(program, equation, arrays, line)
        exact = line in lines
        if not exact:
            arrays = [x.astype(FLOAT32) if _is_float(x) and x.dtype == FLOAT64 else x for x in arrays]
            if all(x.dtype == dtype for x, dtype in zip(arrays, traced, strict=True) if _is_float(x)):
                return evaluated(program, equation, arrays, line)
        wide = FLOAT64 if exact else FLOAT32
        key = KEYS.get(name, "")
        narrows = key and params[key] is not None and jnp.issubdtype(params[key], jnp.floating)
        if narrows and (exact or name != "convert_element_type"):
            params[key] = wide
        results = equation.primitive.bind(*(jnp.asarray(x, wide) if _is_float(x) else x for x in arrays), **params)
        return list(results) if equation.primitive.multiple_results else [results]

    return evaluate


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating)) and hasattr(x, "dtype")


def _distance(gradients: Sequence[Any], exact: Sequence[Any]) -> float:
    """Return the distance of gradients from the exact ones, over the norm of the exact ones."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(gradients, exact, strict=True)]
    apart, norm = (
        np.sqrt(sum(float(np.sum(z**2)) for z in of)) for of in ([x - y for x, y in pairs], [y for _, y in pairs])
    )
    return float(apart / norm) if norm else float("inf")
