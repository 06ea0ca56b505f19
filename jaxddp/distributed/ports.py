"""Free ports for several processes on this machine."""

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port that is free, as is the port after it."""
    while True:
        port = random.randrange(20000, 30000, 2)
        with contextlib.suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port
