"""Jobs of jax, and the child process that runs them."""

import contextlib
import dataclasses
import os
import subprocess
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxddp.config.options import Platform
from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.ports import free_port
from jaxddp.distributed.processes import joined
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.parity.case_interface import AnyCase, AnyPortCase, Trajectory
from jaxddp.parity.jax_side.checked_step import forget_programs, side_of
from jaxddp.parity.jax_side.excerpt_program import FREE
from jaxddp.parity.jax_side.held_types import own_settings
from jaxddp.parity.jax_side.micro_gradients import micro_records, program
from jaxddp.parity.jax_side.optimizer_line import note_optimizers
from jaxddp.parity.jax_side.recorded_runs import forced_records, free_records, starting_weights
from jaxddp.parity.jax_side.side import pure_loss
from jaxddp.parity.jax_side.widened import is_narrow
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import PortFile
from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.processes import (
    STARTING,
    Child,
    ChildError,
    Tell,
    Watch,
    answers,
    end_all,
    free_at_once,
    reported,
    telling,
)
from jaxddp.parity.records import Records, RecordWriter, is_large_model
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.side import default_dtype

MOST_MAPS = 30_000  # memory maps of a process that keeps its programs for the next case
OTHER_WIDTH = "Cannot lower jaxpr with verifier errors"  # begins the error


class JaxJob(Protocol):
    """A job for the jax process."""

    @property
    def case(self) -> AnyCase:
        """Model or port whose code runs."""

    def run(self, tell: Tell) -> Any:
        """Do the job and return the answer, which is sent to the parent.

        Args:
            tell: reports to the parent what the process is doing.
        """


@dataclass(frozen=True)
class Free:
    """A job that takes the case's steps freely and records them.

    Attributes:
        case: model or port, and the number of steps.
        start: initial weights under torch's names.
        folder: folder of the records to write.
    """

    case: AnyCase
    start: Arrays
    folder: Path

    def run(self, tell: Tell) -> None:
        """Take the steps."""
        writer = _begun(self, tell)
        forget_programs()
        program.cache_clear()
        for step, record in enumerate(free_records(self.case, self.start), start=1):
            writer.write({stage: record[stage] for stage in (*FREE, "spread") if stage in record})
            tell(f"after step {step}, running by itself")


@dataclass(frozen=True)
class Forced:
    """A job that takes each of the case's steps from the reference's state and records it.

    Attributes:
        case: model or port, and the number of steps.
        start: initial weights of the reference.
        reference: folder of the reference's records.
        folder: folder of the records to write.
        most: number of steps to take, from the first; None: all.
        replicas: number of replicas on one device, if they are not on one each.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    folder: Path
    most: int | None = None
    replicas: int | None = None

    def run(self, tell: Tell) -> None:
        """Take the steps."""
        writer = _begun(self, tell)
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        on_one = None if self.replicas is None else VirtualReplicas(self.replicas)
        moments = [variant.moments for variant in getattr(self.case, "variants", ())] or None
        records = forced_records(self.case, reference, replicas=on_one, moments=moments)
        for step, record in enumerate(islice(records, self.most), start=1):
            writer.write(record)
            del record  # frees its memory before the next step
            tell(f"after step {step}")


def _begun(job: Free | Forced, tell: Tell) -> RecordWriter:
    """Return the writer of a job's records, before the job's first step."""
    if is_large_model(job.start):
        free_at_once()
    tell("jax_model or step 1")
    return RecordWriter(job.folder)


@dataclass(frozen=True)
class Micro:
    """A job that computes the gradients of single micro-batches and records them.

    Attributes:
        case, start, reference, folder: see `Forced`.
        steps: steps whose micro-batches are used, from 0, ascending.
    """

    case: AnyCase
    start: Arrays
    reference: Path
    folder: Path
    steps: tuple[int, ...]

    def run(self, tell: Tell) -> None:
        """Compute the gradients."""
        writer = RecordWriter(self.folder)
        reference = Trajectory(self.start, torch_records(self.reference, self.case.world_size))
        for step, record in zip(self.steps, micro_records(self.case, reference, self.steps), strict=True):
            writer.write(record)
            tell(f"gradients of micro-batches, step {step + 1}")


@dataclass(frozen=True)
class Starts:
    """A job that compares the weights from which the replicas start.

    Attributes:
        case: a port with a `jax_start`.
        weights: torch's initial weights.
    """

    case: AnyCase
    weights: Arrays

    def run(self, tell: Tell) -> dict[str, float]:
        """Return, for each tensor that differs between replicas, the largest difference from replica 0."""
        tell("jax_start")
        of_ranks = starting_weights(self.case, self.weights)
        return {
            name: max(float(np.max(np.abs(tensors[name] - first))) for tensors in of_ranks)
            for name, first in of_ranks[0].items()
            if any(not np.array_equal(tensors[name], first) for tensors in of_ranks)
        }


@dataclass(frozen=True)
class NarrowArrays:
    """A job that finds arrays of an optimizer, and constants without a twin, that are declared in float32.

    Attributes:
        case: a port.
        start: initial weights of the reference.
    """

    case: AnyPortCase
    start: Arrays

    def run(self, tell: Tell) -> tuple[str, ...]:
        """Return the names of the optimizer's fields and of the constants."""
        tell("jax_optimizer")
        with jax.enable_x64(True):
            side = side_of(self.case)
            buffers = pure_loss(self.case.port, self.case.port.jax_model())[0].buffers
            opt_state = side.replica_step.init(*side.from_torch(self.start)).opt_state
        narrow = [path for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0] if is_narrow(x)]
        fields = [next((x.name for x in reversed(path) if hasattr(x, "name")), "state") for path in narrow]
        return tuple(dict.fromkeys([*fields, *(name for name in side.alone if is_narrow(buffers[name]))]))


def serve(devices: int, platform: Platform | None, cluster: Cluster | None, connection: Connection) -> None:
    """Run jobs until None arrives, as a `Child`'s target.

    Args:
        devices: number of jax devices, over all processes.
        platform: "cpu" or "gpu"; None: GPUs if there are enough, else the CPU.
        cluster: this process among several that share the devices; None: it has them all.
        connection: the child's end of the pipe.
    """
    with contextlib.ExitStack() as run:
        with reported(connection, "--platform"):
            run.enter_context(joined(cluster, {}, STARTING))
            if platform == "cpu" or (platform is None and devices > _gpus()):
                jax.config.update("jax_platforms", "cpu")
            prepare(devices, platform, cluster)
            note_optimizers()
            connection.send(("done", None))
        last = None
        while (job := connection.recv()) is not None:
            case = _unedited(job.case.with_dtype("float64"))  # both dtypes, FindTwins and patches share programs
            if case != last or _maps() > MOST_MAPS:
                jax.clear_caches()  # each program maps memory, and Linux limits a process to 65,530 maps
                last = case
            with (
                reported(connection, job.case.name),
                own_settings(job.case.name),
                default_dtype("float32"),
                jax.default_matmul_precision("highest"),
            ):
                connection.send(("done", _result(job, telling(connection))))


def _result(job: JaxJob, tell: Tell) -> Any:
    """Return a job's result; run it again without compiled programs if one has a constant of the other width.

    jax keeps parts of programs, and a constant of NumPy in them has the width of the run that was first (jax 0.10).
    """
    try:
        return job.run(tell)
    except ValueError as error:
        if OTHER_WIDTH not in str(error):
            raise
    jax.clear_caches()
    return job.run(tell)


def _unedited(case: AnyCase) -> AnyCase:
    """Return the case of the port's files as they are, if it is that of a patch: most of its programs are the same."""
    source = getattr(case, "source", None)
    if isinstance(source, PortFile):
        return replace(case, source=replace(source, texts=()))  # type: ignore[type-var]
    if isinstance(source, DrawnSource) and isinstance(source.source, PortFile):
        return replace(case, source=replace(source, source=replace(source.source, texts=())))  # type: ignore[type-var]
    return case


def _maps() -> int:
    """Count the memory maps of this process; 0 where there is no /proc."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def _gpus() -> int:
    """Count the GPUs by asking the driver: jax cannot go back to the CPU once it has looked for GPUs."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([number for number in visible.split(",") if number.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=STARTING)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


class JaxChild:
    """A child process with jax, or several that share its devices, kept from job to job.

    Args:
        devices: number of jax devices, over all processes.
        platform: "cpu" or "gpu"; None: GPUs if there are enough, else the CPU.
        timeout: seconds without a message after which the process counts as hanging.
        processes: number of processes, which divides the number of devices.
        watch: see `answers`.
    """

    def __init__(
        self,
        devices: int,
        platform: Platform | None = None,
        timeout: float = 300.0,
        processes: int = 1,
        watch: Watch = lambda children: None,
    ):
        self._timeout, self._watch = timeout, watch
        address = f"127.0.0.1:{free_port()}" if processes > 1 else ""
        self._children = []
        for number in range(processes):
            cluster = Cluster(address, processes, number) if address else None
            name = f"jax process {number}" if number else "jax"
            self._children.append(Child(name, serve, (devices, platform, cluster)))
        self._at_work: list[Child] = []
        self._ready = False

    def start(self, job: JaxJob) -> None:
        """Begin a job; `wait` returns its answer."""
        if not self._ready:
            self._start()
        first, *others = self._children
        first.give(job)
        self._at_work = [first]
        if isinstance(job, Free | Forced | Micro):  # other jobs run on one replica's device
            self._at_work += others
            for child in others:
                child.give(dataclasses.replace(job, folder=job.folder / child.name))  # each records all

    def _start(self) -> None:
        try:
            answers(self._children, max(STARTING, self._timeout), self._watch)
        except ChildError as error:  # drop the trace: a child that failed to start takes no jobs
            raise ChildError(error.child, error.where, error.what) from None
        self._ready = True

    def heard(self) -> list[Child]:
        """Return the processes at work, or that were last, after taking their messages."""
        for child in self._at_work:
            with contextlib.suppress(EOFError, ConnectionError):  # `wait` tells that it is dead
                child.hear()
        return self._at_work

    def wait(self) -> Any:
        """Wait for the job that was begun and return its answer.

        Raises:
            ChildError: the process raised, died or hung.
        """
        return answers(self._at_work, self._timeout, self._watch)[0]

    def do(self, job: JaxJob) -> Any:
        """Run a job and return its answer."""
        self.start(job)
        return self.wait()

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the process to end, then kill it."""
        end_all(self._children, patience)


def jax_records(folder: Path) -> Records:
    """Return the records in a folder that jax has written."""
    return Records([folder])
