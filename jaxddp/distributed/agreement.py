"""Agreement between processes: on events that only some of them see, such as a signal, and on data that all read."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxddp.distributed.collectives import all_reduce
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError

DELAY = 4  # calls until a number is known everywhere, so that no call waits for a step


class Agreement:
    """Largest number that any process passed `delay` calls ago; a single process gets its number back at once.

    All processes make the same calls, so all learn a number between the same two steps.

    Args:
        replicas: the replicas of all processes.
        delay: calls until a number is known; 0: each waits for all processes.

    >>> from jaxddp.distributed.devices import prepare
    >>> Agreement(Replicas(prepare(2, "cpu")))(15)
    15
    """

    def __init__(self, replicas: Replicas, delay: int = DELAY):
        self._replicas, self._delay = replicas, delay
        self._largest = replicas.map(lambda x: all_reduce(x, "max"), in_axes=(0,), out_axes=None)
        self._pending: deque[jax.Array] = deque()

    def __call__(self, number: int) -> int:
        """Pass this process's number, at least 0; return the agreed one, 0 before `delay` calls."""
        if self._replicas.in_one_process:
            return number
        mine = self._replicas.shard(np.full(len(self._replicas.local_ranks), number, np.int32))
        self._pending.append(self._largest(mine))
        return int(self._pending.popleft()) if len(self._pending) > self._delay else 0


def check_same(texts: Mapping[str, str], replicas: Replicas, advice: str) -> None:
    """Check that all processes have the same texts; all must call it.

    Args:
        texts: what each process should have, by name.
        replicas: the replicas of all processes.
        advice: end of the message.

    Raises:
        InputError: a process has another text than process 0.

    >>> from jaxddp.distributed.devices import prepare
    >>> check_same({"training data": "6d27"}, Replicas(prepare(2, "cpu")), "give all the same file")
    """
    if replicas.in_one_process:
        return
    digests = _digests_of_all(list(texts.values()), replicas)
    for rank, of_rank in enumerate(digests):
        for name, digest, first in zip(texts, of_rank, digests[0], strict=True):
            if not np.array_equal(digest, first):
                number = replicas.devices[rank].process_index
                raise InputError(f"process {number} and process 0 have different {name}; {advice}")


def check_sees(read: Callable[[], str], replicas: Replicas, what: str, patience: float) -> None:
    """Wait until all processes read what process 0 reads, as a shared file system may show it late; all must call it.

    Args:
        read: reads a file; an `OSError` or `ValueError` means that it is not there yet. If process 0 cannot read it,
            nothing is checked.
        replicas: the replicas of all processes.
        what: flag and folder of the file, for the message.
        patience: seconds to wait.

    Raises:
        InputError: this process still reads something else.

    >>> from jaxddp.distributed.devices import prepare
    >>> check_sees(lambda: "process 4711 on node1", Replicas(prepare(2, "cpu")), "--output runs/a", patience=1)
    """
    if replicas.in_one_process:
        return
    first = _digests_of_all([_read_or_nothing(read)], replicas)[0, 0]
    deadline = time.monotonic() + patience
    while not np.array_equal(_digest(_read_or_nothing(read)), first):
        if time.monotonic() > deadline:
            number = jax.process_index()
            raise InputError(f"{what}: process {number} does not see this folder of process 0; choose a shared one")
        time.sleep(0.1)
    replicas.meet()


def _read_or_nothing(read: Callable[[], str]) -> str:
    try:
        return read()
    except (OSError, ValueError):  # not there yet, or something else
        return ""


def _digests_of_all(texts: Sequence[str], replicas: Replicas) -> np.ndarray:
    """Return the SHA-256 of the texts of each replica's process, (world_size, len(texts), 32) of uint8."""
    mine = np.stack([_digest(text) for text in texts])
    return np.asarray(replicas.gather(replicas.shard(np.stack([mine] * len(replicas.local_ranks)))))


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
