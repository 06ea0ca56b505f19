"""Worker processes that read batches of a source, in order, ahead of the training step.

    trainer -- jobs, batches --> worker 0, 1, ...     a pipe each; batch b comes from worker b mod N
       |                            ^
       `-- source --> reader ------ forks             jaxddp.data.sources.reader, a fresh process without a framework

The reader gets the source once, so that the workers share its memory, and starts no threads, so that it may fork; the
trainer may not, since jax and torch have threads. Functions and classes of the user's file travel by value
(cloudpickle): its top level does not run again.

Considered and left: `ProcessPoolExecutor` and Grain's `mp_prefetch` import the trainer's main module, and with it jax,
in each worker; neither says which example a dead worker was reading, ends one that hangs, or ends the workers of a
trainer that was killed. Measured on two busy cores with two workers: 71,000 windows of 1,024 tokens per second, where
the pool reads 28,000, torch's DataLoader 25,000 and Grain 15,000. Images per second: 1,200, like the pool; torch's
DataLoader 1,600, Grain 330.
"""

import contextlib
import io
import mmap
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from jaxddp.data.sources.arrays import Arrays, mapping
from jaxddp.data.sources.source import Job, Source
from jaxddp.errors import InputError, TrainingError, described
from jaxddp.scripts import PREFIX

READER = "jaxddp.data.sources.reader"
AHEAD = 2  # batches that are asked of each worker before the first is used
PATIENCE = 5.0  # seconds for a dead worker's exit code to arrive


class DataWorkers:
    """Processes that read the batches of a source.

    Args:
        source: the source.
        count: number of worker processes, at least 1.
        timeout: seconds that a batch may take, the first one with the start of its worker; 0: any time.

    Raises:
        InputError: the source cannot be sent to another process.

    >>> from jaxddp.data.sources import as_source
    >>> workers = DataWorkers(as_source({"x": np.arange(10)}), count=2, timeout=60)
    >>> [part["x"].tolist() for (part,) in workers.read(Job(0, (np.array([i, 0]),)) for i in range(3))]
    [[0, 0], [1, 0], [2, 0]]
    >>> workers.close()
    """

    def __init__(self, source: Source, count: int, timeout: float = 0.0):
        self._where, self._timeout = source.where, timeout or None
        pickled = _pickled(source)
        pipes = [multiprocessing.Pipe() for _ in range(count + 1)]
        self._control, *self._workers = [ours for ours, _ in pipes]
        with tempfile.TemporaryFile() as file:  # tells which example each worker reads
            file.truncate(8 * count)
            self._reading = np.frombuffer(mmap.mmap(file.fileno(), 8 * count), np.int64)
            descriptors = [theirs.fileno() for _, theirs in pipes]
            self._process = subprocess.Popen(
                [sys.executable, "-m", READER, str(file.fileno()), *map(str, descriptors)],
                pass_fds=[file.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # only the trainer acts on a terminal's Ctrl-C
            )
        for _, theirs in pipes:
            theirs.close()
        self.close = weakref.finalize(self, _end, self._process, [ours for ours, _ in pipes])
        """End the processes."""
        self._next = 0
        self._arrived: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        with contextlib.suppress(ConnectionError):  # reported by `_lost`
            self._control.send_bytes(pickled)

    def read(self, jobs: Iterable[Job]) -> Iterator[list[Arrays]]:
        """Yield the parts of each job in turn.

        Raises:
            InputError: an example cannot be read; see `Source.take`.
            TrainingError: a worker died, or took longer than the timeout.
        """
        waiting: deque[int] = deque()
        try:
            for job in jobs:
                if len(waiting) == AHEAD * len(self._workers):
                    yield self._receive(waiting.popleft())
                waiting.append(self._give(job))
            while waiting:
                yield self._receive(waiting.popleft())
        finally:
            for number in waiting:
                if self._arrived.pop(number, None) is None:
                    self._unwanted.add(number)

    def _give(self, job: Job) -> int:
        number, self._next = self._next, self._next + 1
        with contextlib.suppress(ConnectionError):  # reported by `_lost`
            self._workers[number % len(self._workers)].send((number, *job))
        return number

    def _receive(self, number: int) -> list[Arrays]:
        worker = number % len(self._workers)
        while number not in self._arrived:
            connection = self._workers[worker]
            try:
                if not connection.poll(self._timeout):
                    raise self._hung(worker)
                arrived, error, answer = connection.recv()
                if error is not None:
                    raise error
                parts = [{name: _array(connection, *kind) for name, kind in part.items()} for part in answer]
            except (EOFError, OSError):
                raise self._lost(worker) from None
            if arrived in self._unwanted:
                self._unwanted.remove(arrived)
            else:
                self._arrived[arrived] = parts
        return self._arrived.pop(number)

    def _hung(self, worker: int) -> TrainingError:
        place = f"{self._where}: example {self._reading[worker]}"
        return TrainingError(
            f"{place}: worker process {worker} has not finished its batch in time ({self._timeout:g} s)"
        )

    def _lost(self, worker: int) -> TrainingError:
        """Return an error that says how a worker ended."""
        how = "the process that starts them is gone"
        try:
            while self._control.poll(PATIENCE):
                number, code = self._control.recv()
                if number == worker:
                    how = _ending(code)
                    break
                if number is None:  # the source cannot be rebuilt there
                    return TrainingError(f"{self._where}: worker processes: {code}")
        except (EOFError, OSError):
            pass
        return TrainingError(f"{self._where}: example {self._reading[worker]}: worker process {worker}: {how}")


def _end(process: subprocess.Popen[bytes], connections: list[Connection]) -> None:
    """Close the pipes, so that the reader ends its workers and itself."""
    for connection in connections:
        connection.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", as when memory is used up" * (-code == signal.SIGKILL)
    return f"died of {signal.Signals(-code).name}{memory}"


def _array(connection: Connection, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(shape, kind)
    if array.nbytes:
        connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
    return array


def _environment() -> dict[str, str]:
    """Return the reader's environment variables: this process's module path, one thread per library, no GPU."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**os.environ, **one, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


# ---- what is sent


def _pickled(source: Source) -> memoryview:
    """Pickle a source; modules that another process could not import travel by value, like a user's file."""
    by_value = [module for name, module in list(sys.modules.items()) if _is_loaded_from_elsewhere(name, module)]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(source)
        return buffer.getbuffer()
    except Exception as error:
        raise InputError(
            f"{source.where}: cannot be sent to worker processes: {described(error)}; open files in "
            "__getitem__, or read without workers"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_loaded_from_elsewhere(name: str, module: Any) -> bool:
    """Return whether a module of a Python file is not the one that an import of its name finds."""
    file = getattr(module, "__file__", None)
    of_package = "." in name and not name.rpartition(".")[2].startswith(PREFIX)
    if of_package or not file or not file.endswith(".py") or file.startswith(sys.base_prefix):
        return False
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)  # editable installs have their own finders
    found = next((spec for spec in specs if spec is not None), None)
    return name != "__main__" and (found is None or found.origin != file)


class _Pickler(cloudpickle.Pickler):
    """Pickler that sends arrays mapped from a file by their place in it."""

    def reducer_override(self, value: Any) -> Any:
        root = mapping(value)
        if root is None or min(value.strides, default=0) < 0 or not value.size:
            return super().reducer_override(value)
        start = root.offset + value.ctypes.data - root.ctypes.data
        extent = sum((n - 1) * step for n, step in zip(value.shape, value.strides, strict=True)) + value.itemsize
        return map_again, (str(root.filename), start, extent, value.dtype, value.shape, value.strides)


def map_again(
    path: str, start: int, extent: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """Map an array from a file in another process; its `extent` bytes begin at byte `start`."""
    return np.ndarray(shape, dtype, np.memmap(path, np.uint8, "r", start, (extent,)), strides=strides)
