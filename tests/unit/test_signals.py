"""Signals end a run and prints do not, whatever has become of those who read what it prints."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.signals import Interruption, needing_no_reader
from tests.support.waiting import wait_for

LAST_WORDS = """
import sys
from jaxddp.signals import ending
with ending(7):
    print("why", file=sys.stderr, flush=True)
"""
WAITS = """
import threading
from jaxddp.signals import Interruption
with Interruption("runs/a") as interruption:
    interruption.listen()
    print("listens", flush=True)
    threading.Event().wait(60)
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Return the end to write to of a pipe that is full, as after Ctrl-S or when a reader has stopped."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def test_prints_succeed_though_their_reader_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with needing_no_reader():
            print("read", flush=True)
            assert os.read(reader, 100) == b"read\n"
            os.close(reader)
            print("lost", flush=True)
        assert sys.stdout is stream


def test_lines_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        with needing_no_reader():
            print("within")
        print("after")
    assert (tmp_path / "out").read_text() == "before\nwithin\nafter\n"


def test_streams_that_are_no_files_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.TextIOWrapper(io.BytesIO()), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        with needing_no_reader():
            assert sys.stdout is stream


def test_a_process_ends_though_its_last_words_find_no_room_or_no_reader(full_pipe: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (full_pipe, writer):
        assert subprocess.run([sys.executable, "-c", LAST_WORDS], stderr=stream, timeout=30).returncode == 7
    os.close(writer)


def test_a_second_signal_ends_a_run_whose_messages_find_no_room(full_pipe: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=full_pipe) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"listens\n"
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.3)
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.parametrize("comes_before", [False, True])
def test_a_signal_that_comes_after_the_others_have_stopped_this_process_is_ignored_once(comes_before: bool) -> None:
    """As torchrun signals one process after the other, while they stop together within milliseconds."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with pytest.raises(SystemExit), Interruption("runs/a", quiet=True) as interruption:
            interruption.listen()
            if comes_before:
                signal.raise_signal(signal.SIGUSR1)
                wait_for(lambda: interruption.signal)
            interruption.stop(signal.SIGUSR1, step=3)
        signal.raise_signal(signal.SIGUSR1)
        assert len(received) == comes_before
        signal.raise_signal(signal.SIGUSR1)
        assert len(received) == 1 + comes_before
    finally:
        signal.signal(signal.SIGUSR1, before)
