"""Dispatches of programs: several batches in one, or one each where that is faster, and a bound on those in flight."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxddp.config.ranges import MOST
from jaxddp.distributed.replicas import Axes, Replicas
from jaxddp.state import TrainState
from jaxddp.step.loops import slow_forms, slow_in_loops
from jaxddp.step.metrics import RUN_AHEAD

MEASURED = 2  # dispatches, of which the fastest counts
LONGEST = 1.0  # seconds


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
        slow: whether batches are computed one at a time; None: not yet known.
    """

    def __init__(self, replicas: Replicas, function: Callable[..., Any], axes: Axes, out_axes: Axes, **options: Any):
        def of_one(state: TrainState, batches: Any, k: jax.Array) -> Any:
            return function(state, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, k, 1), batches))

        self.program = replicas.map(function, (axes, 0), out_axes, **options)
        self._one = replicas.map(of_one, (axes, 0, None), out_axes, **options)
        self._on_cpu = replicas.devices[0].platform == "cpu"
        self.slow: bool | None = None
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
        if self.slow is None:
            self.slow = self._on_cpu and self._look(state, batches)
        return self.slow and _count(batches) > 1

    def _look(self, state: TrainState, batches: Any) -> bool:
        """Return whether the program is slow in a loop, and warn of slow forms in it; jax keeps the trace."""
        program = jax.make_jaxpr(self.program)(state, batches)
        for line in slow_forms(program, loops=int(_count(batches) > 1)):
            warnings.warn(line, stacklevel=2)
        return slow_in_loops(program)


class Pace:
    """Choice of the steps per dispatch and of the dispatches in flight, by the time that a step takes.

    A run begins with dispatches of a step, each waited for. After `MEASURED` of them, all that is in flight is to take
    `LONGEST` seconds, so that metrics and signals do not wait for longer. Processes go by the slowest of them.

    Args:
        choose: called with a number, sets the steps per dispatch to at most this, and returns them.
        agree: returns the largest number that a process passes; all processes call it after the same step.
        clock: time in seconds.

    Attributes:
        run_ahead: largest number of dispatches in flight.

    >>> clock = iter([0.0, 9.0, 9.0, 9.125, 9.125, 9.25]).__next__
    >>> pace = Pace(lambda most: print(most) or most, agree=int, clock=clock)
    >>> for dispatch in range(3):
    ...     pace.begin()
    ...     pace.end()
    1
    1
    >>> pace.run_ahead
    8
    """

    def __init__(
        self, choose: Callable[[int], int], agree: Callable[[int], int], clock: Callable[[], float] = time.perf_counter
    ):
        self._choose, self._agree, self._clock = choose, agree, clock
        self._seconds: list[float] = []
        self._begun: float | None = None
        self.run_ahead = 0

    def begin(self) -> None:
        """Begin to read the batch of a dispatch."""
        if self._begun is None:
            self._choose(1)
        self._begun = self._clock()

    def end(self) -> None:
        """End a dispatch and, after enough of them, choose; later calls have no effect."""
        if self.run_ahead or self._begun is None:
            return
        self._seconds.append(self._clock() - self._begun)
        if len(self._seconds) > MEASURED:  # after the first, which compiles
            seconds = self._agree(min(math.ceil(1e6 * min(self._seconds[1:])), MOST)) / 1e6
            fitting = max(1, int(LONGEST / RUN_AHEAD / seconds))
            steps = self._choose(2 ** (fitting.bit_length() - 1))  # few numbers, since each is a program to compile
            self.run_ahead = min(max(1, int(LONGEST / steps / seconds)), RUN_AHEAD)


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
