"""A check reports its progress: on one line of a terminal, or line by line."""

import io
import os
import pty
import select
import threading

import pytest

from jaxddp.parity import progress
from jaxddp.parity.processes import ChildError
from jaxddp.parity.progress import CAUSES, DRAW, FLOAT32, FORCED, FREE, Progress
from jaxddp.parity.stopping import Stop, Stopped


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Working:
    name, where, heard, reply, failure = "torch rank 0", "torch_model", 1.0, None, None


def test_the_text_has_stage_steps_seconds_and_an_estimate() -> None:
    clock, torch, jax = Clock(), list[int](), list[int]()
    told = Progress(10, [FREE, FORCED, FLOAT32], clock=clock)
    assert told.text() == ""
    with told.stage("drawing"):
        told.watch([Working()])
        assert told.text() == "drawing: torch rank 0: torch_model  ·  0 s"
    with told.stage(FREE, torch=torch, jax=jax):
        clock.now = 40.0
        torch.append(1)
        told.watch([Working()])
        assert told.text() == f"{FREE}: torch 1, jax 0 of 10 steps  ·  40 s"
        jax.append(1)  # it has compiled its first step
        told.watch([Working()])
        torch += [2, 3]
        jax.append(2)
        clock.now = 43.0
        told.watch([Working()])
        # 15 of 20 steps at 1 s, and two more runs of 58 s.
        assert told.text() == f"{FREE}: torch 3, jax 2 of 10 steps  ·  43 s  ·  the runs end in about 2 min"
        assert [*told.untried()] == [f"{FREE}, from step 3 on", FORCED, FLOAT32]
    with told.stage(CAUSES, "the loss differs"):
        clock.now = 44.0
        assert told.text() == f"{CAUSES}: the loss differs  ·  1 s"
    assert [*told.untried()] == [FORCED, FLOAT32] and told.text() == ""


def test_a_stage_that_is_stopped_is_not_done() -> None:
    stop = Stop()
    told = Progress(3, [FORCED, FLOAT32], stop)
    with pytest.raises(Stopped), told.stage(FORCED, jax=[1, 2]):
        told.watch([])
        stop.why = "Ctrl-C"
        told.watch([])
    assert [*told.untried()] == [f"{FORCED}, from step 3 on", FLOAT32]


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_terminal_has_one_line_and_a_pipe_a_line_each_time(terminal: bool) -> None:
    stream, clock = Terminal() if terminal else io.StringIO(), Clock()
    told = Progress(3, stream=stream, clock=clock)
    with told.shown():
        told.show()  # nothing is done yet
        with told.stage("first", "a"):
            told.show()
            told.say("stays")
        with told.stage("and second"):
            told.show()
    if not terminal:
        assert stream.getvalue() == "first: a  ·  0 s\nstays\nand second  ·  0 s\n"
        return
    drawn = [part for part in stream.getvalue().split("\r") if part.strip()]
    assert drawn == ["first: a  ·  0 s", "stays\n", "and second  ·  0 s"] and stream.getvalue().endswith("\r")


def test_progress_is_told_from_time_to_time_and_not_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", {True: 0.01, False: 0.01})
    told, lines = threading.Event(), list[str]()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    shown = Progress(tell=tell)
    with shown.shown(), shown.stage("busy"):
        assert told.wait(10) and lines[0].startswith("busy")
    count = len(lines)
    shown.show()
    assert len(lines) == count


def test_a_closed_stream_ends_nothing() -> None:
    stream = Terminal()
    told = Progress(stream=stream)
    with told.shown(), told.stage("busy"):
        stream.close()
        told.show()
        told.say("unread")


class Failed(Working):
    name, where, reply = "jax", "jax_model or step 1", ("failed", ("port.py: line 3: ValueError", "", ()))
    failure = ChildError("jax", "jax_model or step 1", "port.py: line 3: ValueError")


def test_the_failure_of_one_side_is_said_once_while_the_other_is_at_work() -> None:
    said: list[str] = []
    progress = Progress(tell=said.append)
    working, failed = Working(), Failed()
    progress.watch([working, failed])  # in no run: a search for causes replays what fails
    with progress.stage(FREE):
        progress.watch([failed])
        assert said == []
        for _ in range(2):
            progress.watch([working, failed])
    assert said == ["jax: jax_model or step 1: port.py: line 3: ValueError; torch continues"]


class NoWeights(Working):
    name, where, reply = "torch rank 0", "torch_model", ("failed", ("torch_model: a is complex64", "", ()))
    failure = ChildError("torch rank 0", "torch_model", "torch_model: a is complex64")


@pytest.mark.parametrize(("stage", "follows"), [(DRAW, ""), (FREE, "; jax continues")])
def test_nothing_goes_on_without_the_weights_of_torch(stage: str, follows: str) -> None:
    said: list[str] = []
    progress, jax = Progress(tell=said.append), Working()
    jax.name = "jax"
    with progress.stage(stage):
        progress.watch([jax, NoWeights()])
    assert said == [f"torch rank 0: torch_model: torch_model: a is complex64{follows}"]


def test_a_terminal_that_does_not_say_how_wide_it_is_gets_the_line() -> None:
    ours, terminal = pty.openpty()  # of 0 columns
    with os.fdopen(terminal, "w") as stream:
        progress = Progress(3, ["a stage"], stream=stream)
        with progress.stage("a stage"):
            progress.show()
        text = b""
        while b"a stage" not in text:  # the kernel passes on what is written in pieces, and later; ends at the timeout
            assert select.select([ours], [], [], 10)[0], text
            text += os.read(ours, 1000)
    os.close(ours)
