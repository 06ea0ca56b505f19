"""A request to end a check early: by a signal, by a second one, and by a limit of time."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.progress import Progress
from jaxddp.parity.stopping import ONE, Stop, Stopped
from tests.unit.parity.diagnosis.test_interruptible import Crew

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise, though a shell may have started the tests without it."""
    before = signal.signal(INT, signal.default_int_handler)
    yield
    assert signal.getsignal(INT) == signal.default_int_handler and signal.getsignal(TERM) == signal.SIG_DFL
    signal.signal(INT, before)


@pytest.mark.parametrize(("number", "why"), [(TERM, "SIGTERM"), (INT, "Ctrl-C")])
def test_a_signal_is_noted_and_raises_where_the_check_polls_or_searches(number: signal.Signals, why: str) -> None:
    stop = Stop()
    with stop.listening(INT, TERM):
        stop.poll()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as `timeout` does
        assert stop.why == why
        with pytest.raises(Stopped):
            stop.poll()
        with pytest.raises(Stopped), stop.raising():
            raise AssertionError("is not run")
    stop = Stop()
    with stop.listening(number), pytest.raises(Stopped), stop.raising():
        os.kill(os.getpid(), number)
        time.sleep(10)


def test_a_second_signal_interrupts() -> None:
    stop = Stop()
    with stop.listening(INT, TERM):
        os.kill(os.getpid(), TERM)
        time.sleep(ONE + 0.05)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            os.kill(os.getpid(), INT)
        assert interrupted.type is KeyboardInterrupt and stop.why == "SIGTERM"


def test_a_limit_ends_what_the_main_thread_searches_and_what_another_polls() -> None:
    def search() -> None:
        while time.monotonic() < began + 10:
            sum(range(1000))

    began, crew = time.monotonic(), Crew()
    stop = Stop(0.1)
    searches = InterruptibleSearches(crew, [], Progress(stop=stop))  # type: ignore[arg-type]
    with stop.listening(INT):
        assert searches.run(search) is None
    assert searches.ended and stop.why == "the limit of 0.1 s" and time.monotonic() < began + 5

    def elsewhere() -> None:
        with other.listening(INT):  # no handler: signals are the main thread's
            assert signal.getsignal(INT) == signal.default_int_handler
            time.sleep(0.2)
            with pytest.raises(Stopped):
                other.poll()
            polled.append(True)

    other, polled = Stop(0.1), list[bool]()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert polled


def test_signals_that_the_program_takes_itself_stay_its_own() -> None:
    before = signal.signal(TERM, lambda number, frame: None)
    try:
        with (stop := Stop()).listening(TERM):
            os.kill(os.getpid(), TERM)
        assert not stop.why
    finally:
        signal.signal(TERM, before)


def test_a_share_that_is_spent_ends_its_searches_alone() -> None:
    now = [0.0]
    stop, crew = Stop(60.0, clock=lambda: now[0]), Crew()
    searches = InterruptibleSearches(crew, [], Progress(stop=stop))  # type: ignore[arg-type]

    def search(seconds: float) -> str:
        now[0] += seconds
        stop.poll()
        return "found"

    with searches.share(2):  # 30 s
        assert searches.run(lambda: search(29)) == "found"
        assert searches.run(lambda: search(2)) is None
        assert searches.run(lambda: search(0)) is None and searches.spent
    assert crew.ended == ["all"] and not searches.ended and not stop.why
    with searches.share(1):  # the rest, 29 s
        assert searches.run(lambda: search(28)) == "found"
        assert searches.run(lambda: search(2)) is None
    assert searches.ended and stop.why == "the limit of 60 s"


def test_a_limit_counts_from_where_the_program_began() -> None:
    stop = Stop(10.0, clock=lambda: 12.0, began=3.0)
    assert stop.left == 1.0
    stop.poll()
    with pytest.raises(Stopped):
        Stop(10.0, clock=lambda: 13.5, began=3.0).poll()
