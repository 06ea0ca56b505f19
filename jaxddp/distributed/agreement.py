"""Agreement of all processes on what only some of them know, such as a signal that one has received."""

from collections import deque

import jax
import numpy as np

from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.replicas import Replicas

DELAY = 4  # calls until a number is known everywhere, so that no call waits for a step


class Agreement:
    """Largest number that any process gave `DELAY` calls ago; one process alone knows its own at once.

    All processes make the same calls, so all learn a number between the same two steps.

    Args:
        replicas: the replicas of all processes.

    >>> from jaxddp.distributed.devices import prepare
    >>> Agreement(Replicas(prepare(2, "cpu")))(15)
    15
    """

    def __init__(self, replicas: Replicas):
        self._replicas = replicas
        self._largest = replicas.map(lambda x: all_reduce(x, "max"), in_axes=(0,), out_axes=None)
        self._pending: deque[jax.Array] = deque()

    def __call__(self, number: int) -> int:
        """Give this process's number, at least 0; return the agreed one, 0 before `DELAY` calls."""
        if self._replicas.in_one_process:
            return number
        mine = self._replicas.shard(np.full(len(self._replicas.local_ranks), number, np.int32))
        self._pending.append(self._largest(mine))
        return int(self._pending.popleft()) if len(self._pending) > DELAY else 0
