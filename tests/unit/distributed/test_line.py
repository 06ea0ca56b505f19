"""Lines between processes carry the last words of each, and a held line outlives its far end."""

import contextlib
import socket

import pytest

from jaxddp.distributed.held_line import HeldLine
from jaxddp.distributed.line import Line, close_all


def test_the_last_words_of_a_process_count_though_its_connection_is_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Line(socket.create_connection(server.getsockname()))
        here = Line(server.accept()[0])
        here.send({"alive": True})
        there.send({"done": True})
        there.close()  # with a message unread, which resets the connection
        for _ in range(2):
            here.send({"alive": True})
        assert not here.is_closed
        assert here.arrived() == [{"done": True}]
        here.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["the process ends", "it closes"])
def test_the_last_words_are_sent_though_messages_are_unread(at_once: bool) -> None:
    """Hold back nothing because the message before is not acknowledged, and close without a reset if there is time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Line(socket.create_connection(server.getsockname()))
        here = Line(server.accept()[0])
        for _ in range(20):  # until the system acknowledges late
            for sender, receiver in ((here, there), (there, here)):
                sender.send({"alive": True})
                assert receiver.arrived() == [{"alive": True}]
        here.send({"alive": True})
        there.send({"alive": True})
        there.send_last({"failed": "disk full"})
        if at_once:
            there.close()
        else:
            close_all([there])
        assert here.arrived() == [{"alive": True}, {"failed": "disk full"}]
        is_reset = here.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        assert is_reset == at_once
        here.close()


def test_a_held_line_stays_open_when_the_far_end_closes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as far,
        contextlib.closing(HeldLine(far.getsockname())) as line,
        socket.create_connection(("127.0.0.1", line.port)) as near,
    ):
        connection, _ = far.accept()
        near.sendall(b"there")
        assert connection.recv(5) == b"there"
        connection.sendall(b"back")
        assert near.recv(4) == b"back"
        connection.close()
        near.settimeout(0.5)
        with pytest.raises(TimeoutError):
            near.recv(1)


def test_a_held_line_closes_the_far_end_when_the_near_end_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far, contextlib.closing(HeldLine(far.getsockname())) as line:
        socket.create_connection(("127.0.0.1", line.port)).close()
        connection, _ = far.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(1) == b""
