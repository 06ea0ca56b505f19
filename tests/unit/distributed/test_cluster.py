"""The cluster that flags and launchers' variables describe; half of one, or a contradiction, is an error."""

import pytest

from jaxddp.distributed.cluster import Cluster, find
from jaxddp.errors import InputError

TORCHRUN = {
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
JOB_SET = {"JAX_COORDINATOR_ADDRESS": "run-0-0.run:1234", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("environment", "coordinator", "local_id"),
    [
        (TORCHRUN, "node1:29501", 1),  # torchrun itself listens on MASTER_PORT
        (TORCHRUN | {"MASTER_PORT": "45671"}, "node1:62714", 1),  # of --standalone, whose neighbours may be in use
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "node1:29501", None),
        (SLURM, "gpu007:61454", 1),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, "gpu007:61454", None),
        (OPEN_MPI | {"MASTER_ADDR": "node1", "MASTER_PORT": "99"}, "node1:99", 1),
        (JOB_SET, "run-0-0.run:1234", None),
        (JOB_SET | {"JAX_PROCESS_ID": "3"}, "run-0-0.run:1234", None),
    ],
)
def test_every_launcher_is_understood(environment: dict[str, str], coordinator: str, local_id: int | None) -> None:
    found = find(environment)
    assert (found.coordinator, found.num_processes, found.process_id, found.local_id) == (coordinator, 4, 3, local_id)


def test_processes_of_one_job_agree_on_the_address_and_jobs_do_not_share_it() -> None:
    def address(job: str, rank: str) -> str:
        return find(SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": rank}).coordinator

    assert len({address("41", rank) for rank in "0123"}) == 1
    # The port after it is taken too.
    assert abs(int(address("41", "0").split(":")[1]) - int(address("42", "0").split(":")[1])) == 2


def test_mpirun_on_one_machine_needs_no_address() -> None:
    here = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-node1-42@1"}
    found, other = find(here), find(here | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert found.coordinator == other.coordinator
    assert found.address[0] == "127.0.0.1"


def test_flags_describe_a_cluster_where_no_launcher_does() -> None:
    assert find({}) is None
    assert find({}, "[fd00::1]:1234", 2, 1) == Cluster("[fd00::1]:1234", 2, 1)
    assert Cluster("[fd00::1]:1234", 2, 1).address == ("fd00::1", 1234)


def test_a_flag_moves_a_launchers_coordinator() -> None:
    assert find(OPEN_MPI, coordinator="node9:1").coordinator == "node9:1"


def test_one_process_is_no_cluster() -> None:
    assert find(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) is None
    assert find({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None  # of sbatch, before srun


def test_torchrun_may_be_started_by_srun_and_addresses_may_be_set_beside_it() -> None:
    of_nodes = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert find(of_nodes | TORCHRUN).launcher == "torchrun"
    addresses = {"MASTER_ADDR": "node1", "MASTER_PORT": "1"}  # as scripts for torch export them
    for variables in (addresses, dict.fromkeys(TORCHRUN, "")):
        assert find(SLURM | variables).launcher == "srun"


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_half_of_torchruns_variables_are_an_error(missing: str) -> None:
    with pytest.raises(InputError, match=f"is set, {missing} not; set all of torchrun's variables, or none"):
        find({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is set, MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK not"),
        (dict.fromkeys(TORCHRUN, ""), {}, r"RANK \(empty\), LOCAL_RANK \(empty\): not set; set all"),
        (dict.fromkeys(OPEN_MPI, ""), {}, r"OMPI_COMM_WORLD_SIZE \(empty\), .*: not set; set all of mpir"),
        (dict.fromkeys(SLURM, ""), {}, r"SLURM_STEP_NODELIST \(empty\), .*: not set; set all of srun"),
        ({"SLURM_PROCID": "", "SLURM_NTASKS": ""}, {}, r"NODELIST, .*, SLURM_PROCID \(empty\), .*: not set"),
        (dict.fromkeys(JOB_SET, ""), {}, r"JAX_COORDINATOR_ADDRESS \(empty\), .*: not set; set all of J"),
        (TORCHRUN | {"RANK": " "}, {}, r"MASTER_ADDR is set, RANK \(empty\) not; set all of torchrun's"),
        (SLURM | {"SLURM_PROCID": ""}, {}, r"SLURM_STEP_NODELIST is set, SLURM_PROCID \(empty\) not"),
        (OPEN_MPI | {"MASTER_ADDR": "", "MASTER_PORT": ""}, {}, "--coordinator: missing; mpirun does not say where"),
        ({"JAX_NUM_PROCESSES": "2"}, {}, "JAX_NUM_PROCESSES is set, JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, {}, "SLURM_NTASKS 2: this process was not started by srun"),
        (OPEN_MPI, {}, "--coordinator: missing; mpirun does not say where process 0 is"),
        (TORCHRUN | {"RANK": "4"}, {}, "--process-id 4: must be 0 to 3 .torchrun says that there are 4 processes"),
        (TORCHRUN | {"RANK": "x"}, {}, "RANK x: must be a number"),
        (TORCHRUN | {"RANK": "-1"}, {}, "RANK -1: must be a number"),
        (TORCHRUN | {"RANK": "9" * 5000}, {}, "RANK 99.*: must be a number"),
        ({}, {"coordinator": "a:" + "9" * 5000, "num_processes": 2, "process_id": 0}, "a port from 1 to 65534"),
        (TORCHRUN, {"num_processes": 8}, "--num-processes 8: torchrun says 4; leave the flag out"),
        (TORCHRUN, {"process_id": 0}, "--process-id 0: torchrun says 3"),
        ({}, {"coordinator": "a:1"}, "--num-processes, --process-id: missing"),
        ({}, {"coordinator": "a", "num_processes": 2, "process_id": 0}, "--coordinator a: must be HOST:PORT"),
        ({}, {"coordinator": "a:99999", "num_processes": 2, "process_id": 0}, "a port from 1 to 65534"),
        ({}, {"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "--num-processes 0: must be at least 1"),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environment: dict[str, str], flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(environment, **flags)
