"""jax in a process of its own: takes jobs, writes down what it sees."""

import os
import subprocess
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxddp.distributed.devices import prepare
from jaxddp.parity.flax_side.micro_gradients import micro_records, program
from jaxddp.parity.flax_side.run import forced_records, forget_programs, free_records, starting_weights
from jaxddp.parity.processes import STARTING, Child, ChildError, Tell, answers, reported
from jaxddp.parity.question import Question, Trajectory
from jaxddp.parity.records import Records, RecordWriter, Tensors
from jaxddp.parity.torch_side.pool import torch_records


class Job(Protocol):
    """Something to do in jax."""

    @property
    def case(self) -> Question:
        """Whose code runs."""

    def run(self, tell: Tell) -> Any:
        """Do it; the answer goes back to the parent."""


@dataclass(frozen=True)
class Free:
    """The case's steps, one after the other, recorded.

    Attributes:
        case: what to run.
        start: weights under torch's names.
        folder: of the records.
    """

    case: Question
    start: Tensors
    folder: Path

    def run(self, tell: Tell) -> None:
        """Take the steps."""
        writer = RecordWriter(self.folder)
        tell("flax_model or step 1")
        forget_programs()
        program.cache_clear()
        for step, record in enumerate(free_records(self.case, self.start), start=1):
            kept = ("local_loss", "pure_local_loss", "params", "buffers", "spread")
            writer.write({stage: record[stage] for stage in kept if stage in record})
            tell(f"after step {step}, running by itself")


@dataclass(frozen=True)
class Forced:
    """The case's steps, each from where the reference was.

    Attributes:
        case: what to run.
        start: the reference's first weights.
        reference: folder of its records.
        folder: of the records to be made.
    """

    case: Question
    start: Tensors
    reference: Path
    folder: Path

    def run(self, tell: Tell) -> None:
        """Take the steps."""
        writer = RecordWriter(self.folder)
        tell("flax_model or step 1")
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        for step, record in enumerate(forced_records(self.case, reference), start=1):
            writer.write(record)
            tell(f"after step {step}")


@dataclass(frozen=True)
class Micro:
    """The gradients of single micro-batches, recorded.

    Attributes:
        case, start, reference, folder: as of `Forced`.
        steps: of which, from 0, ascending.
    """

    case: Question
    start: Tensors
    reference: Path
    folder: Path
    steps: tuple[int, ...]

    def run(self, tell: Tell) -> None:
        """Take them."""
        writer = RecordWriter(self.folder)
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        for step, record in zip(self.steps, micro_records(self.case, reference, self.steps), strict=True):
            writer.write(record)
            tell(f"gradients of micro-batches, step {step + 1}")


@dataclass(frozen=True)
class Starts:
    """Whether all replicas start from the same weights.

    Attributes:
        case: what would be run.
        weights: torch's.
    """

    case: Question
    weights: Tensors

    def run(self, tell: Tell) -> dict[str, float]:
        """Tensor -> largest difference of a replica's from replica 0's; of those that differ."""
        tell("flax_start")
        of_ranks = starting_weights(self.case, self.weights)
        return {
            name: max(float(np.max(np.abs(tensors[name] - first))) for tensors in of_ranks)
            for name, first in of_ranks[0].items()
            if any(not np.array_equal(tensors[name], first) for tensors in of_ranks)
        }


def serve(devices: int, platform: str | None, connection: Connection) -> None:
    """Answer jobs until None comes, as `Child` wants it."""
    with reported(connection, "--platform"):
        if platform == "cpu" or (platform is None and devices > _gpus()):
            jax.config.update("jax_platforms", "cpu")
        prepare(devices, platform)
        connection.send(("done", None))
    last = None
    while (job := connection.recv()) is not None:
        if job.case != last:
            jax.clear_caches()  # each program maps memory, of which a process may have 65,530 pieces
            last = job.case
        with reported(connection, job.case.name):
            connection.send(("done", job.run(lambda where: connection.send(("at", where)))))


def _gpus() -> int:
    """How many there are; asked of the driver, as jax could not go back to the CPU once it has looked."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([number for number in visible.split(",") if number.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=STARTING)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


class JaxChild:
    """jax in a child process, which stays up from job to job.

    Args:
        devices: how many.
        platform: "cpu", "gpu", or None for GPUs where there are any.
        timeout: seconds without a word after which it counts as hanging.
    """

    def __init__(self, devices: int, platform: str | None = None, timeout: float = 300.0):
        self._timeout = timeout
        self._child = Child("flax", serve, (devices, platform))
        self._ready = False

    def start(self, job: Job) -> None:
        """Begin a job; `wait` has its answer."""
        if not self._ready:
            self._start()
        self._child.give(job)

    def _start(self) -> None:
        try:
            answers([self._child], max(STARTING, self._timeout))
        except ChildError as error:  # without a trace, since such a child takes no jobs
            raise ChildError(error.child, error.where, error.what) from None
        self._ready = True

    def wait(self) -> Any:
        """The answer of the job that was begun.

        Raises:
            ChildError: it failed, died or hung.
        """
        return answers([self._child], self._timeout)[0]

    def do(self, job: Job) -> Any:
        """The answer of a job."""
        self.start(job)
        return self.wait()

    def end(self, patience: float = 0.0) -> None:
        """End the process."""
        if patience:
            self._child.give(None)
        self._child.end(patience)


def jax_records(folder: Path) -> Records:
    """What jax has written."""
    return Records([folder])
