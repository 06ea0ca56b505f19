"""Runs that Open MPI, Slurm and torchrun start by the scripts of examples/multi_node go on after a killed process."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxddp.distributed.ports import free_port
from tests.support import slurm
from tests.support.waiting import wait_for

pytestmark = pytest.mark.large
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
needs_slurm = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

MPI, SLURM, TORCHRUN = (f"examples/multi_node/{name}" for name in ("mpirun.sh", "slurm.sbatch", "torchrun.sh"))
FLAGS = ("--platform", "cpu", "--dataset", "linear", "--num-examples", "96", "--hidden-sizes", "8")
ENDLESS = (*FLAGS, "--epochs", "1000000", "--checkpoint-every", "20steps")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[slurm.Cluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm.cluster(folder, environment()) as made:
        yield made


@pytest.mark.parametrize(
    ("command", "rank", "signal_name"),
    [
        pytest.param((MPI, "localhost:2"), "OMPI_COMM_WORLD_RANK", "SIGUSR1", marks=needs_mpi, id="mpirun"),
        # It starts anew beside torchrun's store, which stays up and must not take the coordinator's port.
        pytest.param((TORCHRUN, "localhost", "1", "2"), "RANK", "SIGTERM", id="torchrun"),
    ],
)
def test_a_script_goes_on_after_a_killed_process_and_stops_at_a_signal(
    command: tuple[str, ...], rank: str, signal_name: str, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    script = start(run, output, *command, *ENDLESS)
    try:
        check_goes_on_after_a_kill(run, output, rank)
        script.terminate()
        code = script.wait(120)
    finally:
        script.kill()
        left = ranks(run, rank)
        for process in left.values():  # they would train on without their launcher
            os.kill(process, signal.SIGKILL)
    printed = output.read_text()
    assert code == 143 or rank == "RANK", printed
    assert f"{signal_name}: saved the checkpoint of step " in printed, printed
    assert not left


@needs_slurm
def test_a_slurm_job_goes_on_after_a_killed_task_and_stays_cancelled(cluster: slurm.Cluster, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    job = cluster.submit(output, run, SLURM, *ENDLESS)
    check_goes_on_after_a_kill(run, output, "SLURM_PROCID", job.start_soon)
    assert job.show("Restarts") == "1"
    job.call("scancel")
    wait_for(lambda: job.show("JobState") == "CANCELLED", said=output.read_text)
    assert "SIGTERM: saved the checkpoint of step " in output.read_text()


@needs_mpi
def test_mpirun_does_not_try_bad_input_again(tmp_path: Path) -> None:
    script = start(tmp_path / "run", tmp_path / "out", MPI, "localhost:2", *FLAGS, "--lr", "-1")
    assert script.wait(120) == 2
    assert (tmp_path / "out").read_text().count("error: --lr -1.0: must be at least 0\n") == 2  # by two processes


@needs_slurm
def test_a_slurm_job_with_bad_input_is_not_requeued(cluster: slurm.Cluster, tmp_path: Path) -> None:
    """Train with a loss that is NaN, of which one process hears by itself, and the other one maybe by the first."""
    job = cluster.submit(tmp_path / "out", tmp_path / "run", SLURM, *FLAGS, "--lr", "1e30")
    wait_for(lambda: "FAILED" in job.show("JobState") or job.show("Restarts") != "0", said=(tmp_path / "out").read_text)
    assert (job.show("ExitCode"), job.show("Restarts")) == ("2:0", "0")


SRUN = """#!/usr/bin/env bash
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_TASKS=2
while [[ $1 = --* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" ${OF_TASK_1:-} & second=$!
wait $first; code=$?; wait $second; other=$?
exit $((code > other ? code : other))
"""


@pytest.mark.parametrize(
    ("flags", "of_task_1", "code"),
    [(("--lr", "1e30"), "", 2), (("--devices", "3"), "", 2), ((), "--lr x", 2), (("--stall-timeout", "0.001"), "", 70)],
)
def test_the_script_for_slurm_requeues_what_another_try_mends(
    flags: tuple[str, ...], of_task_1: str, code: int, tmp_path: Path
) -> None:
    """Run it by a stand-in for srun, which, as srun does, returns the highest exit code of its tasks."""
    for name, script in (("srun", SRUN), ("scontrol", f"#!/bin/sh\necho $@ >>{tmp_path}/requeued\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": f"{random.randrange(2000)}", "SLURM_CPUS_PER_TASK": "1", "OF_TASK_1": of_task_1}
    variables |= {"RUN": f"{tmp_path}/run", "PATH": f"{tmp_path}{os.pathsep}{environment()['PATH']}"}
    done = subprocess.run(
        ["bash", SLURM, *FLAGS, *flags], env=environment() | variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "requeued").exists() == (code != 2)


def test_mpirun_refuses_localhost_beside_other_hosts() -> None:
    done = subprocess.run(["bash", MPI, "localhost:1,node2:1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: localhost:1,node2:1: localhost is another machine on each")


def environment() -> dict[str, str]:
    """Return the variables with which `python` is this one, and mpirun runs as root."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **as_root, "PATH": path, "PYTHONPATH": f"{Path.cwd()}", "MPLBACKEND": "agg"}


def start(run: Path, output: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a script on this machine."""
    variables = environment() | {"RUN": str(run), "MASTER_PORT": f"{free_port()}"}
    with output.open("w") as file:
        return subprocess.Popen(["bash", *command], env=variables, stdout=file, stderr=subprocess.STDOUT)


def check_goes_on_after_a_kill(
    run: Path, output: Path, rank_variable: str, restart: Callable[[], None] = lambda: None
) -> None:
    """Kill process 1 after the first checkpoint, and wait until another attempt trains on from there."""
    wait_for(lambda: any(path.name.isdigit() for path in run.glob("checkpoints/*")), said=output.read_text)
    os.kill(ranks(run, rank_variable)[1], signal.SIGKILL)
    restart()

    def epochs_by_attempt() -> list[list[str]]:
        attempts = output.read_text().split("JAX cpu, 2 processes\n")[1:]
        return [re.findall(r"^epoch +(\d+)/", printed, re.MULTILINE) for printed in attempts]

    wait_for(lambda: len(epochs := epochs_by_attempt()) == 2 and epochs[1], said=output.read_text)
    # torchrun may end process 0 before it notices; then torchrun alone says which process died.
    told = ["error: process 1 of 2 has died\n"]
    if rank_variable == "RANK":
        told.append("failed (exitcode: -9) local_rank: 1 ")
    assert any(line in output.read_text() for line in told), output.read_text()
    assert int(epochs_by_attempt()[1][0]) > 1


def ranks(run: Path, variable: str) -> dict[int, int]:
    """Return the processes that train into a run folder, by the number that a launcher's variable gives them."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, pairs = ((process / name).read_bytes().decode().split("\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        variables = dict(pair.partition("=")[::2] for pair in pairs)
        if "jaxddp.train" in command and variables.get("RUN") == str(run) and variable in variables:
            found[int(variables[variable])] = int(process.name)
    return found
