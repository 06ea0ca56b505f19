"""Joining: all processes of a run connect to process 0, which lets them continue together or refuses the run.

Anyone may connect to an open port, so process 0 drops connections that send anything that a process would not send,
and waits for all connections at once, so that a silent stranger delays no process.
"""

import contextlib
import itertools
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

from jaxddp.config.ranges import check_range
from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.line import SILENCE, Line, Message, close_all
from jaxddp.errors import PATIENCE, InputError, LostError, listed, shortened, tell, telling

LATE = 30.0  # seconds for which process 0 still refuses latecomers of a run that cannot begin
_LONGEST = 80  # characters of another process's value in a message


def tell_failure(cluster: Cluster, reason: str) -> None:
    """Report to the other processes, joined or still to join, that this one failed, so that none waits for it."""
    with contextlib.suppress(InputError, LostError, KeyboardInterrupt):
        join(cluster, {}, LATE, reason)


def join(cluster: Cluster, config: Mapping[str, Any], timeout: float, failure: str | None = None) -> dict[int, Line]:
    """Wait until all processes of a run have joined.

    Args:
        cluster, config, timeout: see `jaxddp.distributed.peers.Peers`.
        failure: why this process failed before; reported to the others, and the run does not start.

    Returns:
        Connections by process: in process 0 to all others, elsewhere to process 0.

    Raises:
        InputError, LostError: see `jaxddp.distributed.peers.Peers`.
    """
    check_range("join_timeout", timeout, f"timeout {timeout}")
    about = {"process": cluster.process_id, "size": cluster.num_processes, "config": dict(config), "failure": failure}
    about = json.loads(json.dumps(about))  # as the others receive it
    return (_gather if cluster.process_id == 0 else _ask)(cluster, about, timeout)


def _gather(cluster: Cluster, about: Message, timeout: float) -> dict[int, Line]:
    """Wait in process 0 for the others, and let all of them continue at once."""
    deadline, others = time.monotonic() + timeout, cluster.num_processes - 1
    arrived: list[Line] = []
    lines: dict[int, Line] = {}
    with _Door(cluster) as door, telling(lambda seconds: _waiting(cluster, lines, seconds, timeout), PATIENCE):
        try:
            if about["failure"] is not None:
                raise InputError(f"process 0 failed: {about['failure']}")
            _listen(cluster, cluster.address[1]).close()  # jax will listen there
            while len(lines) < others:
                if (arrival := door.next(deadline)) is None:
                    raise InputError(_missing(cluster, lines, timeout))
                line, hello = arrival
                if _refused_alone(line, hello, cluster):
                    continue
                arrived.append(line)
                _check_fits(hello, about, lines)
                lines[hello["process"]] = line
        except InputError as error:
            refused = {"refused": str(error)}
            for line in arrived:
                line.send_last(refused)
            deadline = min(deadline, time.monotonic() + LATE)
            while len(arrived) < others and (arrival := door.next(deadline)) is not None:
                arrived.append(arrival[0])
                arrival[0].send_last(refused)
            close_all(arrived)
            raise
    for line in lines.values():
        line.send({"go": True})
    return lines


class _Door:
    """Port of process 0 at which the others identify themselves, as a context manager."""

    def __init__(self, cluster: Cluster):
        self._size = cluster.num_processes
        self._server = _listen(cluster, cluster.address[1] + 1)
        self._server.setblocking(False)  # a connection may be gone before it is accepted
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for key in self._selector.get_map().values():
            (key.data or self._server).close()
        self._selector.close()

    def next(self, deadline: float) -> tuple[Line, Message] | None:
        """Return a connection and its process's first message; None if none arrives before the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    with contextlib.suppress(OSError):
                        line = Line(self._server.accept()[0])
                        self._selector.register(line.socket, selectors.EVENT_READ, line)
                    continue
                line = key.data
                messages = line.arrived()
                if messages or line.is_closed:
                    self._selector.unregister(line.socket)
                    if messages and _is_hello(messages[0]):
                        return line, messages[0]
                    line.close()
        return None


def _is_hello(message: Message) -> bool:
    """Return whether a message identifies a process of a run."""
    if message.keys() != {"process", "size", "config", "failure"}:
        return False
    process, size, failure = message["process"], message["size"], message["failure"]
    numbers = type(process) is int and type(size) is int
    return numbers and isinstance(message["config"], dict) and (failure is None or isinstance(failure, str))


def _listen(cluster: Cluster, port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except OSError as error:
        raise InputError(
            f"--coordinator {cluster.coordinator}: port {port}: {_reason(error)}; choose another port"
        ) from None


def _refused_alone(line: Line, hello: Message, cluster: Cluster) -> bool:
    """Refuse a process whose number or size is not of this run, and say so; return whether it was refused."""
    number, size = hello["process"], hello["size"]
    if size == cluster.num_processes and 0 <= number < size:
        return False
    who = f"process {shortened(f'{number}', _LONGEST)} of {shortened(f'{size}', _LONGEST)}"
    problem = f"{who} is not of the run of {cluster.num_processes} processes at {cluster.coordinator}"
    line.send_last({"refused": problem})
    line.close()
    tell(f"refused: {problem}")
    return True


def _check_fits(hello: Message, about: Message, others: Iterable[int]) -> None:
    """Raise `InputError` if a process failed before it joined, does not fit process 0, or has joined already."""
    number = hello["process"]
    if hello["failure"] is not None:
        raise InputError(f"process {number} failed: {hello['failure']}")
    if number in (0, *others):
        raise InputError(f"two processes have the number {number}")
    for name, value in about["config"].items():
        if (other := hello["config"].get(name)) != value:
            has, wanted = shortened(json.dumps(other), _LONGEST), json.dumps(value)
            raise InputError(f"process {number} has {name} = {has}, process 0 {wanted}; start all with one command")


def _missing(cluster: Cluster, present: Mapping[int, Line], timeout: float) -> str:
    absent, some = _absent(cluster, present)
    return f"{absent} did not come within {timeout:g} s: {some}"


def _waiting(cluster: Cluster, present: Mapping[int, Line], seconds: float, timeout: float) -> str:
    absent, some = _absent(cluster, present)
    return (
        f"process 0 at {cluster.coordinator} has waited {seconds:.0f} s for {absent}: {some} "
        f"(--join-timeout {timeout:g})"
    )


def _absent(cluster: Cluster, present: Mapping[int, Line]) -> tuple[str, str]:
    """Return how many processes have not come, and the numbers of the first few."""
    size = cluster.num_processes
    absent = (str(number) for number in range(1, size) if number not in present)  # may be very many
    return f"{size - 1 - len(present)} of {size} processes", listed([*itertools.islice(absent, 6)], 5, ", ")


def _ask(cluster: Cluster, about: Message, timeout: float) -> dict[int, Line]:
    """Connect to process 0 and wait for its answer."""
    deadline = time.monotonic() + timeout
    lines: dict[int, Line] = {}  # to process 0, once there is one

    def waiting(seconds: float) -> str:
        what = "to begin the run, since it waits for others" if lines else f"to answer, port {cluster.address[1] + 1}"
        return (
            f"process {cluster.process_id} has waited {seconds:.0f} s for process 0 at {cluster.coordinator} {what} "
            f"(--join-timeout {timeout:g})"
        )

    with telling(waiting, PATIENCE):
        line = lines[0] = _connect(cluster, deadline, timeout)
        line.send(about)
        answer = line.receive(deadline + SILENCE)  # process 0 gives up first, and says who is missing
    if answer is not None and "refused" not in answer:
        return lines
    was_closed = line.is_closed
    close_all([line])
    if answer is not None:
        raise InputError(f"{answer['refused']}")
    if was_closed:
        raise LostError(f"process 0 at {cluster.coordinator} ended before all processes had come")
    raise InputError(
        f"process 0 at {cluster.coordinator} has not begun the run within {timeout:g} s; "
        "it still waits for other processes"
    )


def _connect(cluster: Cluster, deadline: float, timeout: float) -> Line:
    host, port = cluster.address
    while True:
        try:
            connection = socket.create_connection((host, port + 1), timeout=2)
            if connection.getsockname() != connection.getpeername():
                return Line(connection)
            # The system gave it the very port that it looks for, on which no process listens yet.
            connection.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"--coordinator {cluster.coordinator}: process 0 did not answer within "
                    f"{timeout:g} s ({_reason(error)}, port {port + 1})"
                ) from None
            time.sleep(0.2)


def _reason(error: OSError) -> str:
    words = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
    return (words or str(error) or type(error).__name__).lower()
