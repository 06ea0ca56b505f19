"""Processes that have joined end together, however one of them ends."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from jaxddp.distributed.ports import free_port

PROGRAM = """
import os, sys, time
import numpy as np
from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.processes import joined
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError

number = int(sys.argv[2])
cluster = Cluster(sys.argv[1], 2, number)
with joined(cluster, {}, 60):
    replicas = Replicas(prepare(platform="cpu", cluster=cluster))
    replicas.meet()
    print("met", flush=True)
"""
ENDS = {
    "an error, when the other has nothing left to do": (
        "    if number == 0:\n        time.sleep(1)\n        raise InputError('the disk is full')",
        "process 0 failed: the disk is full",
        2,
    ),
    "a kill, when the other has nothing left to do": (
        "    if number == 0:\n        time.sleep(1)\n        os.kill(os.getpid(), 9)",
        "process 0 of 2 has died",
        69,
    ),
    "an exit, when the other waits for it": (
        "    sys.exit(3) if number == 0 else replicas.meet()",
        "process 0 failed: 3",
        3,
    ),
}


@contextlib.contextmanager
def two_processes(program: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes of a run; kill those that are left."""
    arguments, pipe = [sys.executable, "-c", program, f"127.0.0.1:{free_port()}"], subprocess.PIPE
    processes = [subprocess.Popen([*arguments, number], stdout=pipe, stderr=pipe, text=True) for number in "01"]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ending", "reason", "code"), ENDS.values(), ids=ENDS)
def test_if_one_process_ends_before_its_time_the_other_says_so_and_ends_alike(
    ending: str, reason: str, code: int
) -> None:
    started = time.monotonic()
    with two_processes(PROGRAM + ending) as processes:
        said, complained = processes[1].communicate(timeout=90)
    assert said == "met\n"
    assert complained == f"error: {reason}\n"
    assert processes[1].returncode == code
    assert time.monotonic() - started < 60  # jax's own patience: 100


BUSY = """
import threading
from jaxddp.distributed import peers

def late(thread, timeout=None, join=threading.Thread.join):
    join(thread, timeout)
    if thread is threading.main_thread():
        time.sleep(20)

threading.Thread.join = late  # a thread that waits for the end of the main thread wakes up late
if number == 1:
    peers.BEAT = 4.0  # half of it passes before this process answers a failure
"""


def test_a_process_that_fails_is_not_taken_for_one_that_is_done() -> None:
    """jax leaves the run at exit too, which must not let the others pass that wait for the end of the run."""
    ending, reason, code = ENDS["an error, when the other has nothing left to do"]
    with two_processes(PROGRAM.replace("with joined", f"{BUSY}\nwith joined") + ending) as processes:
        _, complained = processes[1].communicate(timeout=90)
        processes[0].wait(90)
    assert complained == f"error: {reason}\n"
    assert [process.returncode for process in processes] == [code, code]


STALL = """
    from jaxddp.distributed.stall import StallWatch

    def wait_for_a_batch_that_never_comes():
        time.sleep(60)

    def wait_for_the_other_process():
        replicas.meet()

    with StallWatch(2 if number == 1 else 50, tell=peers.stalled) as watch:
        watch.doing("step 7")
        wait_for_a_batch_that_never_comes() if number == 0 else wait_for_the_other_process()
"""


def test_a_process_that_hangs_shows_where_though_another_one_notices_it() -> None:
    program = PROGRAM.replace("joined(cluster, {}, 60)", "joined(cluster, {}, 60) as peers") + STALL
    with two_processes(program) as processes:
        told = [process.communicate(timeout=90)[1] for process in processes]
    error = "step 7 has not ended after 2 s (--stall-timeout); what each thread is doing:"
    assert [text.splitlines()[0] for text in told] == [f"error: process 1 failed: {error}", f"error: {error}"]
    assert "wait_for_a_batch_that_never_comes" in told[0]
    assert "wait_for_the_other_process" in told[1]
