"""Processes that have joined end together, however one of them ends."""

import subprocess
import sys
import time

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
    ),
    "a kill, when the other has nothing left to do": (
        "    if number == 0:\n        time.sleep(1)\n        os.kill(os.getpid(), 9)",
        "process 0 of 2 has died",
    ),
    "an exit, when the other waits for it": (
        "    sys.exit(3) if number == 0 else replicas.meet()",
        "process 0 failed: 3",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ending", "reason"), ENDS.values(), ids=ENDS)
def test_if_one_process_ends_before_its_time_the_other_says_so_and_ends(ending: str, reason: str) -> None:
    started = time.monotonic()
    arguments = [sys.executable, "-c", PROGRAM + ending, f"127.0.0.1:{free_port()}"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([*arguments, number], stdout=pipe, stderr=pipe, text=True) for number in "01"]
    try:
        said, complained = processes[1].communicate(timeout=90)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert said == "met\n"
    assert complained == f"error: {reason}\n"
    assert processes[1].returncode == 69
    assert time.monotonic() - started < 60  # jax's own patience: 100
