"""A Slurm cluster of one node on this machine, for the time of a test."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxddp.distributed.ports import free_port
from tests.support.waiting import wait_for

CONFIG = """
ClusterName=here
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmdPort={next_port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=localhost NodeHostname={host} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
ONE_NODE = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")  # for slurm.sbatch's header


@dataclass(frozen=True)
class Job:
    """A job of a cluster.

    Attributes:
        number: number of the job.
        environment: variables by which Slurm's commands find the cluster.
    """

    number: str
    environment: dict[str, str]

    def call(self, *command: str) -> str:
        """Run a command of Slurm's on the job; return what it prints."""
        return _call(self.environment, *command, self.number)

    def show(self, name: str) -> str:
        """Return a value of the job, as `scontrol show job` has it."""
        shown = dict(word.partition("=")[::2] for word in self.call("scontrol", "show", "job").split())
        return shown[name]

    def start_soon(self) -> None:
        """Let the job, once it is requeued, start in 5 seconds instead of two minutes.

        At once, slurmd would take it for the attempt that has just ended ("Job credential revoked").
        """
        wait_for(lambda: self.show("JobState") == "PENDING", said=lambda: self.call("scontrol", "show", "job"))
        _call(self.environment, "scontrol", "update", f"JobId={self.number}", "StartTime=now+5")


@dataclass(frozen=True)
class Cluster:
    """Slurm's daemons.

    Attributes:
        environment: variables by which Slurm's commands find the cluster.
    """

    environment: dict[str, str]

    def submit(self, output: Path, run: Path, script: str, *arguments: str) -> Job:
        """Submit a script as a job of two tasks with the variable RUN."""
        command = ("sbatch", "--parsable", *ONE_NODE, "--output", str(output), script, *arguments)
        environment = self.environment | {"RUN": str(run)}
        return Job(_call(environment, *command).strip(), self.environment)


def missing() -> str:
    """Return why this machine can have no cluster; "" if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


@contextlib.contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    """Start Slurm's daemons with a configuration in a folder, and end them with all jobs."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    port, config = free_port(), folder / "slurm.conf"
    config.write_text(CONFIG.format(port=port, next_port=port + 1, folder=folder, host=socket.gethostname()))
    environment = environment | {"SLURM_CONF": str(config)}
    with contextlib.ExitStack() as daemons:
        for name, *flags in (("slurmctld", "-D"), ("slurmd", "-D", "-N", "localhost")):
            daemons.enter_context(_daemon([name, *flags], folder / f"{name}.log", environment))
        _wait_for_node(environment, folder)
        try:
            yield Cluster(environment)
        finally:
            _call(environment, "scancel", "--signal=KILL", "--full", "--user=root")


@contextlib.contextmanager
def _daemon(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _wait_for_node(environment: dict[str, str], folder: Path) -> None:
    def shown() -> str:
        asked = subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True)
        return asked.stdout.strip() or asked.stderr

    def logs() -> list[str]:
        return [shown(), *(log.read_text()[-1000:] for log in folder.glob("*.log"))]

    wait_for(lambda: shown() == "idle", said=logs)


def _call(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout
