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
