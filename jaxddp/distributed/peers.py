"""Watch over the processes of a run: if one dies, hangs or fails, the others end within seconds, with one line.

Every process keeps a connection to process 0, by which it joins the run, is heard of once a second, and hears of the
others. jax's own runtime notices a dead process after 100 seconds, aborts with a stack trace, and does not say which.

    joining      process k says its number, the size of the run and its configuration; process 0 answers "go" once all
                 are there, or says what does not fit
    training     both ends say "alive"; an end that is closed, or silent for `SILENCE` seconds, is a lost process
    the end      a process says "done" before it leaves, or "failed" and why; if nothing moved in it, "stalled" too, and
                 the others print what they were doing
"""

import contextlib
import itertools
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.stall import print_with_threads
from jaxddp.errors import InputError, listed
from jaxddp.signals import ending

EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h: another process of the run is gone
BEAT = 1.0  # seconds between two signs of life
SILENCE = 7.0  # seconds after which a process that is not heard of is lost; the others end within 10
_LONGEST = 2**20  # bytes of a message

Message = dict[str, Any]


def end_process(reason: str, show_threads: bool) -> None:
    """Print why the run cannot go on, and end this process at once, whatever its other threads are waiting for."""
    with ending(EXIT_CODE):
        if show_threads:
            print_with_threads(reason)
        else:
            print(f"error: {reason}", file=sys.stderr, flush=True)


class Peers:
    """Connections between process 0 and the others.

    Args:
        cluster: this process and the address of process 0, which listens on the port after jax's.
        config: options that must be equal in all processes, by name.
        timeout: seconds to wait for all processes.
        on_loss: called in a thread when another process is lost; it ends this one. Its arguments are the reason, and
            whether to show what each thread is doing.

    Raises:
        InputError: not all processes came in time, two have the same number, their sizes or configurations differ,
            or the port is taken.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Mapping[str, Any],
        timeout: float,
        on_loss: Callable[[str, bool], None] = end_process,
    ):
        self._cluster, self._on_loss = cluster, on_loss
        self._deadline, self._timeout = time.monotonic() + timeout, timeout
        self._lines: dict[int, _Line] = {}  # by process; in process 0 of all others, elsewhere of process 0
        self._leaving = threading.Event()
        about = {"process": cluster.process_id, "size": cluster.num_processes, "config": dict(config)}
        about = json.loads(json.dumps(about))  # as the others receive it
        try:
            (self._gather if cluster.process_id == 0 else self._join)(about)
        except BaseException:
            _close(self._lines.values())
            raise
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def close(self, failure: str | None = None) -> None:
        """Leave the run: the other processes do not miss this one, or learn why it failed."""
        self._leave({"done": True} if failure is None else {"failed": failure})

    def stalled(self, what: str) -> None:
        """Leave a run in which nothing moves: the other processes show what their threads are doing, and end."""
        self._leave({"failed": what, "stalled": True})

    def _leave(self, message: Message) -> None:
        if self._leaving.is_set():
            return
        self._leaving.set()
        for line in self._lines.values():
            line.send_last(message)
        self._thread.join(2 * BEAT)
        _close(self._lines.values())

    def _gather(self, about: Message) -> None:
        """Wait in process 0 until all others have come, and let all of them go on at once."""
        port = self._cluster.address[1]
        self._listen(port).close()  # jax will listen there
        with self._listen(port + 1) as server:
            while len(self._lines) < self._cluster.num_processes - 1:
                server.settimeout(max(0.01, self._deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    self._refuse(self._missing())
                self._admit(_Line(connection), about)
        for line in self._lines.values():
            line.send({"go": True})

    def _listen(self, port: int) -> socket.socket:
        both = socket.has_dualstack_ipv6()
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
            )
        except OSError as error:
            raise InputError(
                f"--coordinator {self._cluster.coordinator}: port {port}: {_reason(error)}; choose another port"
            ) from None

    def _admit(self, line: "_Line", about: Message) -> None:
        hello = line.receive(min(self._deadline, time.monotonic() + SILENCE))
        if hello is None or hello.keys() != about.keys():  # a stranger, or a process that died while it joined
            line.close()
            return
        number = hello["process"]
        if hello["size"] != about["size"]:
            self._refuse(f"process {number} expects {hello['size']} processes, process 0 {about['size']}", line)
        if number in self._lines or number == 0:
            self._refuse(f"two processes have the number {number}", line)
        if differing := [name for name, value in about["config"].items() if hello["config"].get(name) != value]:
            name = differing[0]
            mine, theirs = json.dumps(about["config"][name]), json.dumps(hello["config"].get(name))
            self._refuse(f"process {number} has {name} = {theirs}, process 0 {mine}; start all with one command", line)
        self._lines[number] = line

    def _refuse(self, reason: str, *more: "_Line") -> NoReturn:
        for line in (*self._lines.values(), *more):
            line.send_last({"refused": reason})
        _close(more)
        raise InputError(reason)

    def _missing(self) -> str:
        size = self._cluster.num_processes
        absent = (str(number) for number in range(1, size) if number not in self._lines)  # may be very many
        some = listed(list(itertools.islice(absent, 6)), most=5, joint=", ")
        return f"{size - 1 - len(self._lines)} of {size} processes did not come within {self._timeout:g} s: {some}"

    def _join(self, about: Message) -> None:
        line = self._lines[0] = self._connect()
        line.send(about)
        answer = line.receive(self._deadline + SILENCE)  # process 0 gives up first, and says who is missing
        if answer is None and line.is_closed:
            raise InputError(f"process 0 at {self._cluster.coordinator} ended before all processes had come")
        if answer is None:
            raise InputError(
                f"process 0 at {self._cluster.coordinator} has not begun the run within {self._timeout:g} s; "
                "it still waits for other processes"
            )
        if "refused" in answer:
            raise InputError(answer["refused"])

    def _connect(self) -> "_Line":
        host, port = self._cluster.address
        while True:
            try:
                connection = socket.create_connection((host, port + 1), timeout=2)
                if connection.getsockname() != connection.getpeername():
                    return _Line(connection)
                # The system gave it the very port that it looks for, where nobody listens yet.
                connection.close()
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise InputError(
                        f"--coordinator {self._cluster.coordinator}: process 0 did not answer within "
                        f"{self._timeout:g} s ({_reason(error)}, port {port + 1})"
                    ) from None
                time.sleep(0.2)

    def _watch(self) -> None:
        """Say and hear signs of life until this process leaves; end it when another process is lost."""
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
                # Time in which this process stands still, as after Ctrl-Z in all of them, does not count.
                self._check_heard(min(now - before, 2 * BEAT))
                before = now

    def _take(self, number: int, message: Message) -> None:
        if "failed" in message:
            reason = message["failed"] if "lost" in message else f"process {number} failed: {message['failed']}"
            self._lose(reason, "stalled" in message)
        if "done" in message:
            self._lines[number].is_done = True

    def _check_heard(self, passed: float) -> None:
        """End the run if a process is lost; `passed`: seconds since the last check."""
        size = self._cluster.num_processes
        for number, line in self._lines.items():
            if line.is_done:
                continue
            line.silence += passed
            if line.is_closed:
                self._lose(f"process {number} of {size} has died")
            elif line.silence > SILENCE:
                self._lose(f"process {number} of {size} has been silent for {line.silence:.0f} s")

    def _lose(self, reason: str, stalled: bool = False) -> None:
        """End this process and, if it is process 0, all others."""
        if self._leaving.is_set():
            return
        for line in self._lines.values():
            line.send_last({"failed": reason, "lost": True} | ({"stalled": True} if stalled else {}))
        self._leaving.set()
        _close(self._lines.values())
        self._on_loss(reason, stalled)


class _Line:
    """One end of a connection: messages as lines of JSON, and for how many seconds nothing has come."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.silence = 0.0
        self.is_closed = self.is_done = False
        self._rest = b""

    def send(self, message: Message) -> None:
        """Send a message; if that fails, `arrived` tells why: what the other end said last, or that it is lost."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(BEAT)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def arrived(self) -> list[Message]:
        """Return the messages that have arrived, once the socket can be read."""
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data or len(self._rest) > _LONGEST:
            self.is_closed = True
            return []
        self.silence = 0.0
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [message for message in map(_parsed, lines) if message is not None]

    def receive(self, deadline: float) -> Message | None:
        """Wait for a message; None if the connection is closed or the deadline passes."""
        while not self.is_closed and (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            if messages := self.arrived():
                return messages[0]
        return None

    def send_last(self, message: Message) -> None:
        """Send a message after which there is none.

        The system sends it at once. It would hold it back while the message before is not acknowledged, and discard
        it when this process ends or closes the connection with messages unread.
        """
        self.send(message)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self.socket.close()


def _close(lines: Iterable[_Line]) -> None:
    """Read what comes until the other ends have closed their connections, at the latest for half a `BEAT`; close them.

    With messages unread, the system resets a connection, and no longer repeats what was lost on the way.
    """
    deadline = time.monotonic() + BEAT / 2
    for line in lines:
        while line.receive(deadline) is not None:
            pass
        line.close()


def _parsed(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _reason(error: OSError) -> str:
    words = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
    return (words or str(error) or type(error).__name__).lower()
