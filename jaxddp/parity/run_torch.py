"""Takes a case through torch's DistributedDataParallel, in ranks that are child processes."""

import contextlib
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxddp.errors import TrainingError
from jaxddp.parity.case import LOCAL_STAGES, Question, Tensors, Trajectory, micro_batches_of
from jaxddp.parity.torch_rank import Job, serve
from jaxddp.step import MicroBatches


class TorchPool:
    """Torch ranks that stay up from case to case; a context manager that ends them.

    Args:
        size: the largest world size that cases will ask for.
        timeout: seconds after which a rank that has not answered counts as hanging.

    Raises:
        TrainingError: a rank fails, dies or hangs; all of them have been ended then.
    """

    def __init__(self, size: int, timeout: float = 300.0):
        self._size = size
        self._timeout = timeout

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store_file = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._size, store_file, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a dead rank reads as the end of the connection
            self._connections.append(ours)
            self._processes.append(process)
        self._answers(range(self._size))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for connection in self._connections:
                connection.send(None)
            for process in self._processes:
                process.join(timeout=10)
        self._end()

    def run(self, case: Question, weights: Tensors, batches: Iterable[MicroBatches] | None = None) -> Trajectory:
        """Take the case's steps.

        Args:
            weights: where to start.
            batches: other batches than the case's.
        """
        every = list(case.batches() if batches is None else batches)
        for rank, connection in enumerate(self._connections[: case.world_size]):
            steps = [micro_batches_of(batch, rank) for batch in every]
            with contextlib.suppress(ConnectionError):  # a dead rank; `_answers` tells
                connection.send(Job(case.torch_source, case.dtype, case.world_size, weights, steps))
        return Trajectory(weights, _merge(self._answers(range(case.world_size))))

    def _answers(self, ranks: Iterable[int]) -> list[Any]:
        """One answer of each rank, or the first failure as an error."""
        deadline = time.monotonic() + self._timeout
        waiting, answers = set(ranks), {}
        while waiting:
            ready = multiprocessing.connection.wait([self._connections[rank] for rank in waiting], timeout=1.0)
            if time.monotonic() > deadline:
                self._fail(f"torch ranks {sorted(waiting)} have not answered for {self._timeout:.0f} s")
            for rank in [rank for rank in waiting if self._connections[rank] in ready]:
                try:
                    kind, answers[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(timeout=5)
                    self._fail(f"torch rank {rank} died (exit code {self._processes[rank].exitcode})")
                if kind == "failed":
                    self._fail(f"torch rank {rank} failed:\n{answers[rank]}")
                waiting.remove(rank)
        return [answers[rank] for rank in sorted(answers)]

    def _fail(self, message: str) -> None:
        self._end()
        raise TrainingError(message)

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        self._folder.cleanup()


def _merge(answers: list[list[dict[str, Tensors]]]) -> list[dict[str, Tensors]]:
    """Rank 0's records, with the local stages of all ranks stacked."""
    merged = []
    for records in zip(*answers, strict=True):
        record = dict(records[0])
        for stage in LOCAL_STAGES:
            record[stage] = {name: np.stack([other[stage][name] for other in records]) for name in record[stage]}
        merged.append(record)
    return merged
