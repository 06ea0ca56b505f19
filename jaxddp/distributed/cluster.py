"""Processes of one run, as flags or the variables of a launcher describe them.

    flags        --coordinator HOST:PORT --num-processes N --process-id K
    torchrun     MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK
    JAX          JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID (or Kubernetes' JOB_COMPLETION_INDEX)
    Open MPI     OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK
    Slurm        SLURM_STEP_NODELIST SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_LOCALID SLURM_JOB_ID, as srun sets them

A launcher higher in the list comes first: torchrun may run under srun. Half of a launcher's variables are an error,
because each process would otherwise train alone.
"""

import re
import zlib
from dataclasses import dataclass

from jaxddp.config.launcher import Environment, HalfSetError, complete, is_number, number
from jaxddp.errors import InputError

PORTS = 2  # of each run: jax's coordinator, and jaxddp.distributed.peers on the port after it
_FIRST_PORT, _LAST_PORT = 61440, 65534  # range of the ports that follow from the number of a job, as in jax
# From here on Linux gives ports to whoever asks for any, as `torchrun --standalone` does; the next one may be in use.
_FIRST_EPHEMERAL = 32768


@dataclass(frozen=True)
class Cluster:
    """One process among those of a run.

    Attributes:
        coordinator: "host:port" of process 0; the port after it must be free too.
        num_processes: number of processes on all machines.
        process_id: number of this process, 0 .. num_processes - 1.
        local_id: number of this process among several on its machine; None: it is alone there, or not known.
        launcher: name of the launcher, for messages.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_id: int | None = None
    launcher: str = "--num-processes"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find(
    environment: Environment,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Cluster | None:
    """Return the cluster that flags or the environment describe; None: this process trains alone.

    Args:
        environment: variables, as in `os.environ`.
        coordinator, num_processes, process_id: values of the flags; None: not given.

    Raises:
        InputError: a part of a cluster is missing, is not a number, or contradicts another.

    >>> variables = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    >>> find(variables)
    Cluster(coordinator='node1:29501', num_processes=4, process_id=3, local_id=1, launcher='torchrun')
    """
    given = _of_launcher(environment, coordinator)
    flags = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    if given is None and any(value is not None for value in flags.values()):
        if missing := [name for name, value in flags.items() if value is None]:
            raise InputError(f"{', '.join(missing)}: missing; no launcher's variables are set either")
        assert coordinator is not None and num_processes is not None and process_id is not None
        given = Cluster(coordinator, num_processes, process_id)
    if given is None:
        return None
    _check_agrees("--num-processes", num_processes, given.num_processes, given.launcher)
    _check_agrees("--process-id", process_id, given.process_id, given.launcher)
    _check(given)
    return given if given.num_processes > 1 else None


def _of_launcher(environment: Environment, coordinator: str | None) -> Cluster | None:
    """Return the cluster of the first launcher whose variables are complete; None if no launcher's are set."""
    halves: list[HalfSetError] = []
    for read in (_torchrun, _jax, _open_mpi, _slurm):
        try:
            found = read(environment, coordinator)
        except HalfSetError as half:
            halves.append(half)
            continue
        if found is not None:
            return found
    if halves:
        raise halves[0]
    return None


def _torchrun(environment: Environment, coordinator: str | None) -> Cluster | None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    values = complete("torchrun", environment, names)
    if values is None:
        return None
    host, port, size, rank, local = values
    master = number("MASTER_PORT", port)  # on which torchrun itself listens
    own = master + 1 if master < _FIRST_EPHEMERAL else _port_of(master)
    address = coordinator or f"{host}:{own}"
    alone = environment.get("LOCAL_WORLD_SIZE") == "1"
    local_id = None if alone else number("LOCAL_RANK", local)
    return Cluster(address, number("WORLD_SIZE", size), number("RANK", rank), local_id, "torchrun")


def _jax(environment: Environment, coordinator: str | None) -> Cluster | None:
    names = ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
    if "JAX_PROCESS_ID" not in environment and {"JAX_NUM_PROCESSES", "JOB_COMPLETION_INDEX"} <= environment.keys():
        names[2] = "JOB_COMPLETION_INDEX"  # of an indexed job of Kubernetes
    values = complete("JAX", environment, names)
    if values is None:
        return None
    address, size, rank = values
    return Cluster(coordinator or address, number(names[1], size), number(names[2], rank), None, "JAX's variables")


def _open_mpi(environment: Environment, coordinator: str | None) -> Cluster | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    values = complete("mpirun", environment, names)
    if values is None:
        return None
    size, rank, local_rank, local_size = map(number, names, values)
    address = coordinator or _address_under_mpi(environment, everyone_is_here=local_size == size)
    return Cluster(address, size, rank, None if local_size == 1 else local_rank, "mpirun")


def _address_under_mpi(environment: Environment, everyone_is_here: bool) -> str:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host and port:
        return f"{host}:{port}"
    if everyone_is_here:
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_orte_hnp_uri") or ""
        return f"127.0.0.1:{_port_of(zlib.crc32(job.encode()))}"
    raise InputError(
        "--coordinator: missing; mpirun does not say where process 0 is: pass the HOST:PORT of the first machine"
    )


def _slurm(environment: Environment, coordinator: str | None) -> Cluster | None:
    tasks = environment.get("SLURM_NTASKS") or "1"
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
    if "SLURM_STEP_NODELIST" not in environment and environment.get("SLURM_PROCID") != "":
        if "SLURM_PROCID" in environment and tasks != "1":
            raise HalfSetError(f"SLURM_NTASKS {tasks}: this process was not started by srun; use srun jaxddp train ...")
        return None  # a batch script, or no Slurm
    values = complete("srun", environment, names)
    assert values is not None, "one is set"
    size, rank, local, job = map(number, names[1:], values[1:])
    address = coordinator or f"{first_host(values[0])}:{_port_of(job)}"
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    alone = re.fullmatch(r"1(\(x\d+\))?", per_node) is not None
    return Cluster(address, size, rank, None if alone else local, "srun")


def first_host(nodes: str) -> str:
    """Return the first host in a host list of Slurm.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,b2")
    ('gpu007', 'a1')
    """
    head = re.match(r"[^,\[]+(\[(\w+))?", nodes)
    if head is None:
        raise InputError(f"SLURM_STEP_NODELIST {nodes}: not a list of hosts")
    return head[0].replace("[", "")


def _port_of(job: int) -> int:
    """Return a port for a job, with room for `PORTS`."""
    return _FIRST_PORT + job * PORTS % (_LAST_PORT - _FIRST_PORT)


def _check_agrees(flag: str, given: int | None, known: int, launcher: str) -> None:
    if given not in (None, known):
        raise InputError(f"{flag} {given}: {launcher} says {known}; leave the flag out")


def _check(cluster: Cluster) -> None:
    """Raise `InputError` unless the cluster's numbers are valid."""
    host, _, port = cluster.coordinator.rpartition(":")
    if not host or not is_number(port) or not 0 < int(port) <= _LAST_PORT:
        raise InputError(f"--coordinator {cluster.coordinator}: must be HOST:PORT, with a port from 1 to {_LAST_PORT}")
    if cluster.num_processes < 1:
        raise InputError(f"--num-processes {cluster.num_processes}: must be at least 1")
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise InputError(
            f"--process-id {cluster.process_id}: must be 0 to {cluster.num_processes - 1} ({cluster.launcher} says "
            f"that there are {cluster.num_processes} processes)"
        )
