"""A connection to jax's coordinator that stays open at this end if the coordinator dies.

jax's client aborts its process, with a stack trace, the moment its connection to process 0 is closed. Through a held
line it sees silence instead, long enough for `jaxddp.distributed.peers` to say in one line what happened.
"""

import contextlib
import socket
import threading

_CHUNK = 65536


class HeldLine:
    """A port on this machine whose connections are passed on to an address, and never closed by it.

    Args:
        address: host and port to connect to.

    Attributes:
        port: port on 127.0.0.1.
    """

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="held line", daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        for end in (self._server, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                self._ends.append(near)
                self._pass_on(near)

    def _pass_on(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._address)
        except OSError:
            near.close()  # jax tries again
            return
        self._ends.append(far)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(source, sink, sink is far), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, close: bool) -> None:
    """Pass on all bytes; at the end, close the sink or leave it open."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    if close:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
