"""A connection between two processes of a run, over which messages travel as lines of JSON."""

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

BEAT = 1.0  # seconds between two signs of life
SILENCE = 7.0  # seconds of silence after which a process counts as lost; the others end within 10
_LONGEST = 2**20  # bytes of a message

Message = dict[str, Any]


class Line:
    """One end of a connection.

    Attributes:
        socket: socket of this end.
        silence: seconds without a message; counted by the caller.
        is_closed: whether no more messages can arrive.
        is_done: whether the other process has left the run; set by the caller.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.silence = 0.0
        self.is_closed = self.is_done = False
        self._rest = b""  # of a message whose end has not arrived yet

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
        messages = [message for message in map(_parsed, lines) if message is not None]
        self.is_closed = len(messages) < len(lines)  # the sender is not a process of a run
        return messages

    def receive(self, deadline: float) -> Message | None:
        """Wait for a message; return None if the connection is closed or the deadline passes."""
        while not self.is_closed and (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            if messages := self.arrived():
                return messages[0]
        return None

    def send_last(self, message: Message) -> None:
        """Send the last message.

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


def close_all(lines: Iterable[Line]) -> None:
    """Read what comes until the other ends have closed their connections, for half a `BEAT` at most; close them.

    With messages unread, the system resets a connection, and no longer repeats what was lost on the way.
    """
    deadline = time.monotonic() + BEAT / 2
    for line in lines:
        while line.receive(deadline) is not None:
            pass
        line.close()


def _parsed(line: bytes) -> Message | None:
    """Return a line's message; None if it is not one, since anyone may connect to an open port."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    return message if isinstance(message, dict) else None
