"""Dispatches of programs: several batches in one, or one each where that is faster, and a bound on those in flight."""

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxddp.distributed.replicas import Axes, Replicas
from jaxddp.state import TrainState
from jaxddp.step.loops import slow_forms, slow_in_loops
from jaxddp.step.metrics import RUN_AHEAD


class Dispatch:
    """A function of a state and K batches, mapped over the replicas.

    One program computes all batches. On CPU, a function with convolutions is called with one batch at a time, because
    XLA's CPU backend is slow at convolutions in a loop.

    Args:
        replicas: the replicas.
        function: (state, batches) -> result, for batches of leaves (K, ...) with any K.
        axes: axes of the state, see `Replicas.map`.
        out_axes, options: see `Replicas.map`.

    Attributes:
        program: the function mapped, of K batches at once.
        shapes: shapes and types of the batches so far, for each of which a program was compiled.
    """

    def __init__(self, replicas: Replicas, function: Callable[..., Any], axes: Axes, out_axes: Axes, **options: Any):
        def of_one(state: TrainState, batches: Any, k: jax.Array) -> Any:
            return function(state, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, k, 1), batches))

        self.program = replicas.map(function, (axes, 0), out_axes, **options)
        self._one = replicas.map(of_one, (axes, 0, None), out_axes, **options)
        self._on_cpu = replicas.devices[0].platform == "cpu"
        self._slow: bool | None = None
        self.shapes: set[Any] = set()

    def calls(self, state: TrainState, batches: Any) -> list[Callable[[TrainState], Any]]:
        """Return the calls to make, each a function of the state; together their results are those of the K batches.

        Args:
            batches: leaves (world_size, K, ...).
        """

        leaves, names = jax.tree.flatten(batches)
        self.shapes.add((names, *((x.shape, x.dtype) for x in leaves)))

        def call(program: Callable[..., Any], *k: int) -> Callable[[TrainState], Any]:
            return lambda state: program(state, batches, *k)

        if self._one_by_one(state, batches):
            return [call(self._one, k) for k in range(_count(batches))]
        return [call(self.program)]

    def compiled_text(self, state: TrainState, batches: Any) -> str:
        """Return the program of one call as compiled by XLA, as HLO text; nothing runs."""
        if self._one_by_one(state, batches):
            return self._one.lower(state, batches, 0).compile().as_text()
        return self.program.lower(state, batches).compile().as_text()

    def _one_by_one(self, state: TrainState, batches: Any) -> bool:
        if self._slow is None:
            self._slow = self._on_cpu and self._look(state, batches)
        return self._slow and _count(batches) > 1

    def _look(self, state: TrainState, batches: Any) -> bool:
        """Return whether the program is slow in a loop, and warn of slow forms in it; jax keeps the trace."""
        program = jax.make_jaxpr(self.program)(state, batches)
        for line in slow_forms(program, loops=int(_count(batches) > 1)):
            warnings.warn(line, stacklevel=2)
        return slow_in_loops(program)


class RunAhead:
    """Bound on the dispatches in flight: XLA's CPU devices deadlock with too many."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()

    def add(self, result: jax.Array) -> None:
        """Append a result of the last dispatch, and wait for the dispatch `RUN_AHEAD` before it."""
        self._results.append(result)
        if len(self._results) > RUN_AHEAD:
            self._results.popleft().block_until_ready()


def _count(batches: Any) -> int:
    return jax.tree.leaves(batches)[0].shape[1]
