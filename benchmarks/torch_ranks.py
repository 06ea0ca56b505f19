"""torch DDP as a contender, seen from the parent process: one process per rank, which stay up for a race."""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.in_torch import TorchJob, serve
from benchmarks.race import Failed, Turn
from jaxddp.config.options import Platform

TIMEOUT = 300.0  # seconds that a rank may take to answer; torch.compile takes the longest
PRELOADED = ["torch", "torch._dynamo", "benchmarks.in_torch"]  # seconds each, so imported once for all ranks


@dataclass(frozen=True)
class TorchContender:
    """A job that the ranks have built."""

    connections: Sequence[Connection]
    number: int

    def train(self, steps: int) -> Turn:
        """Train on all ranks; the slowest one's time counts."""
        turns = _ask(self.connections, (self.number, steps))
        return Turn(max(turn.seconds for turn in turns), turns[0].losses)


class TorchRanks:
    """Processes of all ranks."""

    def __init__(self, connections: Sequence[Connection]):
        self._connections = connections

    def build(self, job: TorchJob) -> TorchContender:
        """Build a job on all ranks."""
        return TorchContender(self._connections, _ask(self._connections, job)[0])


@contextlib.contextmanager
def torch_ranks(world_size: int, platform: Platform) -> Iterator[TorchRanks]:
    """Start the ranks, and end all of them on exit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pipes = [context.Pipe() for _ in range(world_size)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=serve, args=(rank, world_size, platform, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()  # so that the connection ends when the rank does
            yield TorchRanks([ours for ours, _ in pipes])
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for ours, _ in pipes:
                ours.close()


def _ask(connections: Sequence[Connection], request: Any) -> list[Any]:
    """Send a request to all ranks; return their answers in order.

    Raises:
        Failed: a rank raised an error, ended, or did not answer in time.
    """
    for connection in connections:
        connection.send(request)
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        waiting = [rank for rank in range(len(connections)) if rank not in answers]
        ready = wait([connections[rank] for rank in waiting], TIMEOUT)
        if not ready:
            raise Failed(f"torch ranks {waiting} have not answered for {TIMEOUT:.0f} s")
        for rank in waiting:
            if connections[rank] not in ready:
                continue
            try:
                answers[rank] = connections[rank].recv()
            except EOFError:
                raise Failed(f"torch rank {rank} has ended") from None
    for rank, answer in answers.items():
        if isinstance(answer, str):
            raise Failed(f"torch rank {rank}: {answer}")
    return [answers[rank] for rank in range(len(connections))]
