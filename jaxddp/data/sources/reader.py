"""The process that forks workers, and the workers; see `jaxddp.data.sources.workers`. Imports neither framework."""

import contextlib
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxddp.data.sources.source import Source
from jaxddp.errors import described
from jaxddp.signals import NUMBERS

LOOK = 0.05  # seconds between two looks for workers that ended


def main(descriptors: Sequence[int]) -> None:
    """Receive the source, fork a worker for each pipe, and report those that end until the trainer closes its pipe."""
    for number in NUMBERS:  # they reach all processes of a terminal or a job; the trainer ends this one
        signal.signal(number, signal.SIG_IGN)
    file, control, *pipes = descriptors
    trainer = Connection(control)
    try:
        source = trainer.recv()
    except EOFError:
        return
    except Exception as error:
        trainer.send((None, described(error)))
        return
    children = {_forked(source, number, file, control, pipes): number for number in range(len(pipes))}
    for pipe in pipes:
        os.close(pipe)
    try:
        _report(trainer, children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _report(trainer: Connection, children: dict[int, int]) -> None:
    """Tell the trainer the exit codes of workers, until it is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            if trainer.poll(LOOK):
                trainer.recv()
            ended, status = os.waitpid(-1, os.WNOHANG) if children else (0, 0)
            if ended:
                trainer.send((children.pop(ended), os.waitstatus_to_exitcode(status)))


def _forked(source: Source, number: int, file: int, control: int, pipes: Sequence[int]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for descriptor in (control, *pipes[:number], *pipes[number + 1 :]):
            os.close(descriptor)
        reading = np.frombuffer(mmap.mmap(file, 8 * len(pipes)), np.int64)
        _work(source, Connection(pipes[number]), reading[number : number + 1])
        code = 0
    except OSError:  # the trainer is gone
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(source: Source, trainer: Connection, reading: Any) -> None:
    """Read the trainer's jobs until it closes its pipe."""
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread takes the jobs at once, so that the trainer, when it gives one, never waits for its own reading.
    threading.Thread(target=_listen, args=(trainer, jobs), daemon=True).start()

    def tell(index: int) -> None:
        reading[0] = index

    while True:
        number, epoch, parts = jobs.get()
        try:
            batch = [source.take(part, epoch, tell) for part in parts]
        except Exception as error:
            trainer.send((number, source.located(error, "a batch"), None))
            continue
        trainer.send((number, None, [{k: (x.dtype.str, x.shape) for k, x in part.items()} for part in batch]))
        for part in batch:
            for array in part.values():
                if array.nbytes:
                    trainer.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _listen(trainer: Connection, jobs: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            jobs.put(trainer.recv())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
