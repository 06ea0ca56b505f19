"""A run in which nothing moves is ended, with one line and where its threads are."""

import subprocess
import sys
import threading
import time

import pytest

from jaxddp.distributed import stall
from jaxddp.distributed.stall import EXIT_CODE, StallWatch

HANGS = """
import threading
from jaxddp.distributed.stall import StallWatch

def wait_for_a_batch_that_never_comes():
    threading.Event().wait(60)

with StallWatch(0.5, "; continue with --resume runs/a") as watch:
    watch.doing("the batch of step 7")
    wait_for_a_batch_that_never_comes()
"""


def test_a_stalled_run_says_what_it_was_doing() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30)
    assert done.returncode == EXIT_CODE
    first, *stacks = done.stderr.splitlines()
    assert first == (
        "error: the batch of step 7 has not ended after 0.5 s (--stall-timeout); continue with --resume runs/a; "
        "what each thread is doing:"
    )
    assert any("wait_for_a_batch_that_never_comes" in line for line in stacks)


@pytest.mark.parametrize("limit", [0, 0.3])
def test_a_run_that_moves_is_not_ended(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallWatch, "_end", lambda watch: pytest.fail("ended"))
    with StallWatch(limit) as watch:
        for step in range(8):
            watch.doing(f"step {step}")
            time.sleep(0.1)


def test_time_before_the_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr(StallWatch, "_end", lambda watch: ends.append(watch._what))
    with StallWatch(0.1) as watch:
        time.sleep(0.4)
        assert ends == []
        watch.doing("step 1")
        time.sleep(0.4)
    assert set(ends) == {"step 1"}


@pytest.mark.parametrize("limit", [0, 60])
def test_the_watch_reminds_of_what_takes_long_in_its_thread(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_TICK", 0.01)
    seen, told = threading.Event(), []

    def remind(what: str, seconds: float) -> None:
        told.append((what, threading.current_thread().name))
        if len(told) == 3:
            seen.set()
        raise BrokenPipeError  # nobody reads any more

    with StallWatch(limit, remind=remind) as watch:
        watch.doing("the batch of step 7")
        assert seen.wait(60)
    assert set(told) == {("the batch of step 7", "stall")}
