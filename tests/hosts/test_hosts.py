"""Runs on several hosts: the same result as on one, and one line when a host, a cable or a number is wrong.

The hosts are network namespaces with addresses in the loopback range, so these tests need root and iproute2.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.hosts import Host, hosts, missing
from tests.support.train_runs import check_close_weights
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.large, pytest.mark.skipif(bool(missing()), reason=missing())]

PORT = 29500
FLAGS = ("--platform", "cpu", "--dataset", "linear", "--num-examples", "96", "--hidden-sizes", "8")
ENDLESS = (*FLAGS, "--epochs", "1000000", "--checkpoint-every", "20steps")
LIMIT = 10.0  # seconds from a fault to the end of all processes


class Run:
    """One process per host, and what each printed."""

    def __init__(self, on: Sequence[Host], folder: Path, *flags: str, size: int | None = None, port: int = PORT):
        self.on, self.folder = list(on), folder
        self.processes = [self._start(number, flags, size or len(self.on), port) for number in range(len(self.on))]

    def _start(self, number: int, flags: Sequence[str], size: int, port: int) -> subprocess.Popen[str]:
        cluster = ("--coordinator", f"{self.on[0].address}:{port}", "--num-processes", f"{size}")
        command = [sys.executable, "-m", "jaxddp.train", *flags, *cluster, "--process-id", f"{number}"]
        with self.output(number).open("w") as output:
            return subprocess.Popen(
                self.on[number].command(*command), stdout=output, stderr=subprocess.STDOUT, env=environment(), text=True
            )

    def output(self, number: int) -> Path:
        """Return the file of what a process prints."""
        return self.folder / f"host{number}.out"

    def wait_for_epoch(self) -> None:
        """Wait until an epoch has ended."""
        wait_for(lambda: "epoch" in self.output(0).read_text(), self.processes, self.ended)

    def ended(self, limit: float = 120) -> list[tuple[int, str]]:
        """Wait for all processes; return exit codes and last lines."""
        deadline = time.monotonic() + limit
        try:
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        lines = [self.output(number).read_text().splitlines() or [""] for number in range(len(self.on))]
        return [(code, last[-1]) for code, last in zip(codes, lines, strict=True)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{Path.cwd()}", "MPLBACKEND": "agg"}


def alone(*flags: str) -> str:
    """Train in one process on this machine; return what it printed."""
    command = [sys.executable, "-m", "jaxddp.train", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.mark.parametrize("count", [2, 4])
def test_hosts_train_as_one_process_does(count: int, tmp_path: Path) -> None:
    flags = (*FLAGS, "--epochs", "2", "--devices", "4", "--output")
    alone(*flags, f"{tmp_path}/one")
    with hosts(count) as made:
        assert [code for code, _ in Run(made, tmp_path, *flags, f"{tmp_path}/many").ended()] == [0] * count
    check_close_weights(tmp_path / "many", tmp_path / "one")


def test_a_delayed_link_changes_no_result(tmp_path: Path) -> None:
    flags = (*FLAGS, "--epochs", "2", "--devices", "2", "--output")
    alone(*flags, f"{tmp_path}/one")
    with hosts(2, delay=0.025) as made:
        assert there_and_back(made[1], made[0]) > 0.1  # by two cables each way; measured: 0.101
        ended = Run(made, tmp_path, *flags, f"{tmp_path}/many").ended()
    assert [code for code, _ in ended] == [0, 0], ended
    check_close_weights(tmp_path / "many", tmp_path / "one")


def there_and_back(one: Host, other: Host) -> float:
    """Return the seconds until a host hears that another one's port is closed."""
    connects = "began = time.monotonic(); socket.socket().connect_ex((sys.argv[1], 9)); print(time.monotonic() - began)"
    command = one.command(sys.executable, "-c", f"import socket, sys, time; {connects}", other.address)
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_a_cut_cable_ends_the_run_which_goes_on_with_the_host_that_is_left(two: list[Host], tmp_path: Path) -> None:
    run = Run(two, tmp_path, *ENDLESS, "--devices", "2", "--output", f"{tmp_path}/run")
    run.wait_for_epoch()
    cut = time.monotonic()
    two[1].cut()
    ended = run.ended()
    assert time.monotonic() - cut < LIMIT  # measured: 8
    assert [code for code, _ in ended] == [69, 69]
    for other, (_, said) in zip((1, 0), ended, strict=True):
        assert re.fullmatch(rf"error: process {other} of 2 has been silent for [78] s", said)
    printed = alone("--resume", f"{tmp_path}/run", "--epochs", "400", "--checkpoint-every", "0")
    assert "2 replicas" in printed and "replicas identical" in printed


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_ends_the_run(victim: int, two: list[Host], tmp_path: Path) -> None:
    run = Run(two, tmp_path, *ENDLESS)
    run.wait_for_epoch()
    killed = time.monotonic()
    two[victim].cut()  # a host that loses power says nothing more
    run.processes[victim].send_signal(signal.SIGKILL)
    ended = run.ended()
    assert time.monotonic() - killed < LIMIT  # measured: 8
    code, said = ended[1 - victim]
    assert code == 69
    assert re.fullmatch(rf"error: process {victim} of 2 has been silent for [78] s", said)


def test_a_dead_coordinator_ends_the_run_at_once(two: list[Host], tmp_path: Path) -> None:
    run = Run(two, tmp_path, *ENDLESS)
    run.wait_for_epoch()
    killed = time.monotonic()
    run.processes[0].send_signal(signal.SIGKILL)
    assert run.ended()[1] == (69, "error: process 0 of 2 has died")
    assert time.monotonic() - killed < LIMIT  # measured: 0.1


def test_a_wrong_number_of_hosts_is_told_on_all(two: list[Host], tmp_path: Path) -> None:
    run = Run(two, tmp_path, *FLAGS, "--join-timeout", "15", size=3)
    assert run.ended() == [(2, "error: 1 of 3 processes did not come within 15 s: 2")] * 2


def test_a_port_in_use_is_told_by_all(two: list[Host], tmp_path: Path) -> None:
    taking = two[0].command(sys.executable, "-c", f"import socket; socket.create_server(('', {PORT})).accept()")
    with subprocess.Popen(taking) as taker:
        time.sleep(1)
        ended = Run(two, tmp_path, *FLAGS, "--join-timeout", "10").ended()
        taker.kill()
    where = f"--coordinator {two[0].address}:{PORT}: port {PORT}"
    assert ended == [(2, f"error: {where}: address already in use; choose another port")] * 2
