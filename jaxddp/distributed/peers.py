"""Watch the processes of a run: if one dies, hangs or fails, the others end within seconds, with one line.

Every process keeps a connection to process 0, through which it joins the run, sends a sign of life once a second, and
learns about the others. jax's own runtime notices a dead process after 100 seconds, aborts with a stack trace, and does
not name it.

    joining      process k sends its number, the size of the run and its configuration, or why it has failed already;
                 process 0 answers "go" once all are there, or says what does not fit
    training     both ends say "alive"; an end that is closed, or silent for `SILENCE` seconds, is a lost process
    the end      a process says "done" before it leaves, or "failed", the reason and its exit code, with which
                 the others end too; if it hung, "stalled" as well, and the others print what they were doing
"""

import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.joining import join
from jaxddp.distributed.line import BEAT, SILENCE, Message, close_all
from jaxddp.distributed.stall import print_with_threads
from jaxddp.errors import LOST, tell
from jaxddp.signals import ending


def end_process(reason: str, show_threads: bool, code: int) -> None:
    """Print why the run cannot continue, and end this process at once, whatever its other threads are waiting for."""
    with ending(code):
        if show_threads:
            print_with_threads(reason)
        else:
            tell(f"error: {reason}")


class Peers:
    """Connections between process 0 and the others.

    Args:
        cluster: this process and the address of process 0, which listens on the port after jax's.
        config: options that must be equal in all processes, by name.
        timeout: seconds to wait for all processes.
        on_loss: called in a thread when another process is lost or has failed; it ends this one. Its arguments are
            the reason, whether to show what each thread is doing, and the exit code.

    Raises:
        InputError: not all processes came in time, one failed before, two have the same number, their sizes or
            configurations differ, or the port is taken.
        LostError: process 0 died while the others joined.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Mapping[str, Any],
        timeout: float,
        on_loss: Callable[[str, bool, int], None] = end_process,
    ):
        self._size, self._on_loss = cluster.num_processes, on_loss
        self._leaving = threading.Event()
        self._lines = join(cluster, config, timeout)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def close(self, failure: str | None = None, code: int = LOST) -> None:
        """Leave the run: the other processes do not miss this one, or learn why it failed and end with its code."""
        self._leave({"done": True} if failure is None else {"failed": failure, "code": code})

    def stalled(self, what: str) -> None:
        """Leave a run without progress: the other processes show what their threads are doing, and end."""
        self._leave({"failed": what, "stalled": True})

    def _leave(self, message: Message) -> None:
        if self._leaving.is_set():
            return
        self._leaving.set()
        for line in self._lines.values():
            line.send_last(message)
        self._thread.join(2 * BEAT)
        close_all(self._lines.values())

    def _watch(self) -> None:
        """Exchange signs of life until this process leaves; end it when another process is lost."""
        with selectors.DefaultSelector() as selector:
            for number, line in self._lines.items():
                selector.register(line.socket, selectors.EVENT_READ, number)
            before = beat = time.monotonic()
            while not self._leaving.is_set():
                for key, _ in selector.select(max(0.0, beat - time.monotonic())):
                    for message in self._lines[key.data].arrived():
                        self._take(key.data, message)
                    if self._lines[key.data].is_closed:
                        selector.unregister(key.fileobj)
                        self._lines[key.data].close()  # the other end may wait for it
                now = time.monotonic()
                if now >= beat:
                    beat = now + BEAT
                    for line in self._lines.values():
                        line.send({"alive": True})
                # Time in which this process is suspended, as after Ctrl-Z in all of them, does not count.
                self._check_heard(min(now - before, 2 * BEAT))
                before = now

    def _take(self, number: int, message: Message) -> None:
        if "failed" in message:
            reason = message["failed"] if "lost" in message else f"process {number} failed: {message['failed']}"
            # All may have met the same error: each then ends by itself, with a line that does not name another.
            if not self._leaving.wait(BEAT / 2):
                self._lose(reason, "stalled" in message, message.get("code", LOST))
        if "done" in message:
            self._lines[number].is_done = True

    def _check_heard(self, passed: float) -> None:
        """End the run if a process is lost; `passed`: seconds since the last check."""
        for number, line in self._lines.items():
            if line.is_done:
                continue
            line.silence += passed
            if line.is_closed:
                self._lose(f"process {number} of {self._size} has died")
            elif line.silence > SILENCE:
                self._lose(f"process {number} of {self._size} has been silent for {line.silence:.0f} s")

    def _lose(self, reason: str, stalled: bool = False, code: int = LOST) -> None:
        """End this process and, if it is process 0, all others."""
        if self._leaving.is_set():
            return
        for line in self._lines.values():
            line.send_last({"failed": reason, "lost": True, "code": code} | ({"stalled": True} if stalled else {}))
        self._leaving.set()
        close_all(self._lines.values())
        self._on_loss(reason, stalled, code)
