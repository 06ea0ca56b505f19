"""Processes join, learn within seconds that another is lost, and leave without being missed."""

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.joining import tell_failure
from jaxddp.distributed.line import Line, close_all
from jaxddp.distributed.peers import Peers
from jaxddp.distributed.ports import free_port
from jaxddp.errors import InputError, LostError
from tests.support.waiting import wait_for

CONFIG = {"lr": 0.1, "hidden_sizes": (8, 8)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"line.BEAT": 0.05, "peers.BEAT": 0.05, "joining.SILENCE": 1.5, "peers.SILENCE": 1.5, "joining.LATE": 5.0}
    for name, value in seconds.items():
        monkeypatch.setattr(f"jaxddp.distributed.{name}", value)


@pytest.fixture
def start() -> "Iterator[Callable[..., Run]]":
    """Make runs, and close their connections after the test."""
    runs: list[Run] = []

    def make(*arguments: Any, **options: Any) -> Run:
        runs.append(Run(*arguments, **options))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.joined:
            process._leaving.set()
            process._thread.join()
            close_all(process._lines.values())


class Run:
    """Processes of a run as threads of this one, and the reasons with which each was ended."""

    def __init__(self, size: int, configs: dict[int, Any] | None = None, timeout: float = 10):
        self.size, self.port = size, free_port()
        self.reasons: dict[int, list[str]] = {number: [] for number in range(size)}
        self.codes: dict[int, int] = {}
        self.shown: set[int] = set()  # processes that show what their threads are doing
        self.joined: list[Peers] = []
        self._configs, self._timeout = configs or {}, timeout

    def join(self, number: int, size: int | None = None) -> Peers:
        cluster = Cluster(f"127.0.0.1:{self.port}", size or self.size, number)

        def end(reason: str, show_threads: bool, code: int) -> None:
            self.shown |= {number} if show_threads else set()
            self.codes[number] = code
            self.reasons[number].append(reason)

        joined = Peers(cluster, self._configs.get(number, CONFIG), self._timeout, end)
        self.joined.append(joined)
        return joined

    def refusal(self, number: int, size: int | None = None) -> str:
        """Return why a process cannot join."""
        with pytest.raises(InputError) as caught:
            self.join(number, size)
        return str(caught.value)

    def all(self) -> list[Peers]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self.join, range(self.size)))


def cut(peers: Peers) -> None:
    """Close a process's connections as its death does."""
    peers._leaving.set()
    for line in peers._lines.values():
        line.socket.shutdown(socket.SHUT_RDWR)


NO_FILE = "--data-path names.txt: no such file"
STALLED = "step 7 has not ended after 600 s (--stall-timeout)"
# How a process ends -> what the others are told, the code with which they end, and whether they show their threads.
ENDINGS: dict[str, tuple[Callable[[Peers], object], str, int, bool]] = {
    "dies": (cut, "process {} of 4 has died", 69, False),
    "stands still": (lambda peers: peers._leaving.set(), "process {} of 4 has been silent for", 69, False),
    "fails": (lambda peers: peers.close(NO_FILE, code=2), f"process {{}} failed: {NO_FILE}", 2, False),
    # All show their threads: the one that notices first is often not the one that hangs.
    "stalls": (lambda peers: peers.stalled(STALLED), f"process {{}} failed: {STALLED}", 69, True),
}


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_others_learn_why_a_process_failed_and_end_with_its_code(
    start: Callable[..., Run], ending: str, victim: int
) -> None:
    end, message, code, show_threads = ENDINGS[ending]
    run = start(4)
    end(run.all()[victim])
    others = [number for number in range(4) if number != victim]
    wait_for(lambda: all(run.reasons[number] for number in others), limit=10)
    assert all(len(run.reasons[n]) == 1 and run.reasons[n][0].startswith(message.format(victim)) for n in others)
    assert run.codes == dict.fromkeys(others, code)
    assert run.shown == (set(others) if show_threads else set())


def test_processes_that_fail_at_once_end_by_themselves(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each say its line: the words of another one name that one."""
    monkeypatch.setattr("jaxddp.distributed.peers.BEAT", 1.0)
    run = start(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda process: process.close("the loss is nan at step 3", 2), run.all()))
    assert run.reasons == {0: [], 1: [], 2: []}


def test_a_process_that_has_finished_is_not_missed(start: Callable[..., Run]) -> None:
    run = start(3)
    processes = run.all()
    for process in (processes[1], processes[0], processes[2]):
        process.close()
        time.sleep(0.3)  # several signs of life
    assert run.reasons == {0: [], 1: [], 2: []}


def test_processes_that_all_stood_still_go_on(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr("jaxddp.distributed.peers.time", clock)
    run = start(3)
    processes = run.all()
    later[0] = 60.0  # after Ctrl-Z
    time.sleep(0.5)
    for process in processes:
        process.close()
    assert run.reasons == {0: [], 1: [], 2: []}


def test_a_process_does_not_take_itself_for_process_0(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks for a port of this machine that nobody listens on may be given that very port by the system."""
    run = start(2)
    connect = socket.create_connection
    itself: list[socket.socket] = []

    def to_itself_at_first(address: tuple[str, int], timeout: float) -> socket.socket:
        if itself:
            return connect(address, timeout)
        given = socket.socket()
        try:
            given.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            given.bind(address)
            given.connect(address)
        except OSError:  # a test beside this one has the port for a moment
            given.close()
            raise
        itself.append(given)
        return given

    monkeypatch.setattr(socket, "create_connection", to_itself_at_first)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(run.join, 1)
        while not itself and not second.done():
            time.sleep(0.01)
        first = pool.submit(run.join, 0)
        for joined in (first.result(20), second.result(20)):
            joined.close()
    assert itself


def test_a_great_number_of_missing_processes_takes_no_memory() -> None:
    message = "999999999 of 1000000000 processes did not come within 0.1 s: 1, 2, 3, 4, 5, ..."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=f"^{message}$"):
        Peers(Cluster(f"127.0.0.1:{free_port()}", 10**9, 0), CONFIG, 0.1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_process_that_does_not_come_is_named_everywhere(start: Callable[..., Run]) -> None:
    run = start(4, timeout=0.6)
    with ThreadPoolExecutor(2) as pool:
        problems = list(pool.map(run.refusal, [0, 2]))
    assert problems == ["2 of 4 processes did not come within 0.6 s: 1, 3"] * 2


@pytest.mark.parametrize(
    ("configs", "numbers", "sizes", "message"),
    [
        ({1: CONFIG | {"lr": 0.2}}, [0, 1], [2, 2], "process 1 has lr = 0.2, process 0 0.1; start all with one comm"),
        ({1: {}}, [0, 1], [2, 2], "process 1 has lr = null, process 0 0.1"),
        ({}, [0, 1, 1], [3, 3, 3], "two processes have the number 1"),
    ],
)
def test_processes_that_do_not_fit_each_other_are_refused(
    start: Callable[..., Run], configs: dict[int, Any], numbers: list[int], sizes: list[int], message: str
) -> None:
    with ThreadPoolExecutor(len(numbers)) as pool:
        problems = list(pool.map(start(len(numbers), configs).refusal, numbers, sizes))
    assert any(problem.startswith(message) for problem in problems)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_failed_before_it_joined_is_waited_for_by_nobody(start: Callable[..., Run], victim: int) -> None:
    run = start(4)

    def problem(number: int) -> str:
        time.sleep(0.2 * number)  # the last one comes when the run has been refused to the others
        if number == victim:
            tell_failure(Cluster(f"127.0.0.1:{run.port}", 4, number), "--lr x: expected FLOAT")
            return ""
        return run.refusal(number)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        problems = list(pool.map(problem, range(4)))
    assert problems.pop(victim) == ""
    assert problems == [f"process {victim} failed: --lr x: expected FLOAT"] * 3
    assert time.monotonic() - began < 4  # LATE: 5


@pytest.mark.parametrize(
    ("dies", "error", "message"),
    [
        (False, InputError, "has not begun the run within 0.1 s; it still waits for other processes"),
        (True, LostError, "ended before all processes had come"),  # may be tried again
    ],
)
def test_a_process_says_what_has_become_of_the_process_0_that_it_waits_for(
    dies: bool, error: type[Exception], message: str
) -> None:
    with socket.create_server(("", free_port() + 1)) as server, ThreadPoolExecutor(1) as pool:
        cluster = Cluster(f"127.0.0.1:{server.getsockname()[1] - 1}", 2, 1)
        joined = pool.submit(Peers, cluster, CONFIG, 10 if dies else 0.1)
        if dies:
            server.accept()[0].close()
        with pytest.raises(error, match=message):
            joined.result(10)


HELLO = {"process": 1, "size": 2, "config": json.loads(json.dumps(CONFIG)), "failure": None}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
NO_PROCESS = st.one_of(
    st.fixed_dictionaries({"process": JSON.filter(lambda value: type(value) is not int or not 0 <= value < 2)}),
    st.fixed_dictionaries({"size": JSON.filter(lambda value: type(value) is not int or value < 2)}),
    st.fixed_dictionaries({"config": JSON.filter(lambda value: not isinstance(value, dict))}),
    st.fixed_dictionaries({"failure": JSON.filter(lambda value: value is not None and not isinstance(value, str))}),
    st.fixed_dictionaries({"more": JSON}),
).map(lambda wrong: json.dumps(HELLO | wrong).encode())
STRANGE = ("[" * 100_000, "9" * 10_000, '{"process": 1e999}', "GET / HTTP/1.1\r\n\r", "x" * 2**21, "null", "\0")


@settings(deadline=None, max_examples=10)
@example([word.encode() for word in STRANGE])
@given(st.lists(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()) | NO_PROCESS, max_size=20))
def test_strangers_are_not_taken_for_processes(words: list[bytes]) -> None:
    run = Run(2)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as strangers:
        first = pool.submit(run.join, 0)
        for number, said in enumerate([b"", *words]):
            stranger = strangers.enter_context(connection(run.port + 1))
            with contextlib.suppress(ConnectionError):  # it hangs up
                stranger.sendall(said + b"\n" * (number % 2))
        second = pool.submit(run.join, 1)
        for joined in (first.result(10), second.result(10)):
            joined.close()
    assert run.reasons == {0: [], 1: []}


def said(capsys: pytest.CaptureFixture[str], *parts: str) -> Callable[[], bool]:
    """Return a function that tells whether some lines on stderr together have all parts."""
    lines: list[str] = []

    def is_said() -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return all(any(part in line for line in lines) for part in parts)

    return is_said


@pytest.mark.parametrize(
    ("number", "size", "named"),
    [
        (1, 3, "process 1 of 3"),
        (5, 2, "process 5 of 2"),
        (-1, 2, "process -1 of 2"),
        (10**30, 10**31, f"process {10**30} of {10**31}"),
        (0, 1, "process 0 of 1"),
        (7 * 10**99, 2, f"process 7{'0' * 79}... (100 characters) of 2"),
    ],
)
def test_a_process_of_another_run_is_refused_alone(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str], number: int, size: int, named: str
) -> None:
    run = start(2)
    problem = f"{named} is not of the run of 2 processes at 127.0.0.1:{run.port}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run.join, 0)
        line = Line(connection(run.port + 1))
        line.send(HELLO | {"process": number, "size": size, "failure": "it failed"})
        assert line.receive(time.monotonic() + 10) == {"refused": problem}
        line.close()
        wait_for(said(capsys, f"refused: {problem}"), limit=10)  # while process 0 still waits
        assert not first.done()
        for joined in (run.join(1), first.result(10)):
            joined.close()
    assert run.reasons == {0: [], 1: []}


def connection(port: int) -> socket.socket:
    """Connect to a port of this machine as soon as a process listens there."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.01)


def test_processes_say_for_whom_they_wait(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxddp.distributed.joining.PATIENCE", 0.05)
    run = start(4, timeout=60)
    where = f"127.0.0.1:{run.port}"
    with ThreadPoolExecutor(4) as pool:
        joining = [pool.submit(run.join, 2)]
        alone = f"process 2 has waited 0 s for process 0 at {where} to answer, port {run.port + 1} (--join-timeout 60)"
        wait_for(said(capsys, alone), limit=20)
        joining.append(pool.submit(run.join, 0))
        lines = (
            f"process 0 at {where} has waited 0 s for 2 of 4 processes: 1, 3 (--join-timeout 60)",
            f"s for process 0 at {where} to begin the run, since it waits for others (--join-timeout 60)",
        )
        wait_for(said(capsys, *lines), limit=20)
        for joined in [*joining, pool.submit(run.join, 1), pool.submit(run.join, 3)]:
            joined.result(20).close()
    capsys.readouterr()
    time.sleep(0.2)
    assert "has waited" not in capsys.readouterr().err  # they wait no longer


def test_a_port_in_use_is_named_by_all(start: Callable[..., Run]) -> None:
    run = start(2)
    told = "port {}: address already in use; choose another port"
    with socket.create_server(("", run.port)), ThreadPoolExecutor(2) as pool:
        for joined in [pool.submit(run.join, number) for number in (0, 1)]:
            with pytest.raises(InputError, match=told.format(run.port)):
                joined.result(10)
    with socket.create_server(("", run.port + 1)), pytest.raises(InputError, match=told.format(run.port + 1)):
        run.join(0)
