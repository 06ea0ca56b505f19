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
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="held line", daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(self._address)
            except OSError:
                near.close()  # jax tries again
                continue
            far.settimeout(None)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, sink, sink is far), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, close: bool) -> None:
    """Pass on all bytes; at the end, close the sink or leave it open."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    if close:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
