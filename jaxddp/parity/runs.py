"""The runs that a check makes, and what is left of them whatever happens to either side."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxddp.parity.compare.judge import judge
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.findings import Problem
from jaxddp.parity.flax_side.child import Forced, Free, Starts, jax_records
from jaxddp.parity.flax_side.child import Job as JaxJob
from jaxddp.parity.port import Facts
from jaxddp.parity.processes import ChildError
from jaxddp.parity.question import Question
from jaxddp.parity.records import Lazy, Records, Scratch, StoredRecord, Tensors
from jaxddp.parity.torch_side.pool import torch_records
from jaxddp.parity.torch_side.rank import Draw, Steps, Summary, rank_folder
from jaxddp.parity.workers import Workers

LOOK_AHEAD = 4  # learning rates are told for so many times the run's steps


class Runs:
    """Both sides through the same steps; a side that fails costs its part, and no more.

    Args:
        case: what is compared.
        workers: the processes.
        seed: from which torch draws the weights.

    Attributes:
        start: torch's weights before the first step; empty if there are none.
        facts: of the training loop.
        summary: of torch's run.
        starts: tensors in which the port's replicas start differently -> by how much.
        problems: what could not be done.
        torch, jax: records in float64, jax's forced by torch's.
        free: jax's by itself.
        torch32, jax32: both forced, in float32.
    """

    def __init__(self, case: Question, workers: Workers, seed: int = 0):
        self.case, self._workers, self._seed = case, workers, seed
        self._scratch = Scratch()
        self.problems: list[Problem] = []
        self.start: Tensors = {}
        self.facts = Facts()
        self.summary = Summary("", [])
        self.starts: dict[str, float] = {}
        self.torch, self.torch32 = self._torch("torch64"), self._torch("torch32")
        self.jax, self.free, self.jax32 = self._jax("jax64"), self._jax("free"), self._jax("jax32")

    def in_float64(self) -> None:
        """Torch by itself, jax by itself, jax forced by torch."""
        with self._noting("torch"):
            ((self.start, self.facts),) = self._workers.torch.do(Draw(self.case.torch_source, "float64", self._seed))
        if not self.start:
            return
        if self.facts.own_start:
            with self._noting("flax"):
                self.starts = self._workers.jax.do(Starts(self.case, self.start))
        self._by_themselves()
        if len(self.torch) and len(self.free):
            with self._noting("flax"):
                self._workers.jax.do(Forced(self.case, self.start, self._path("torch64"), self._path("jax64")))

    def in_float32(self) -> None:
        """Both sides once more, forced by the same reference."""
        case = self.case.with_dtype("float32")
        ranks = [rank_folder(self._path("torch64"), rank) for rank in range(case.world_size)]
        start = {name: x.astype("float32") if x.dtype.kind == "f" else x for name, x in self.start.items()}
        source, folder = case.torch_source, self._path("torch32")
        forced = Steps(source, "float32", case.world_size, len(self.torch), folder, start, reference=ranks)
        with self._beside(Forced(case, start, self._path("torch64"), self._path("jax32"))), self._noting("torch"):
            self._workers.torch.do(forced)

    def evidence(self, steps: int | None = None) -> Evidence:
        """What there is to judge and to explain by.

        Args:
            steps: only the first so many; None: all.
        """
        torch, jax = _first(self.torch, steps), _first(self.jax, steps)
        judgement = judge(torch, jax, self.facts, self.summary.optimizer)
        paths = self._path("torch64"), self._path("jax64")
        return Evidence(self.case, self.facts, self.summary, self.start, torch, jax, *paths, judgement)

    def _by_themselves(self) -> None:
        """Torch's run, which is the reference, and jax's, side by side."""
        case = self.case
        source, folder, ahead = case.torch_source, self._path("torch64"), case.steps * LOOK_AHEAD
        reference = Steps(source, "float64", case.world_size, case.steps, folder, self.start, ahead=ahead)
        with self._beside(Free(case, self.start, self._path("free"))), self._noting("torch"):
            self.summary = self._workers.torch.do(reference)[0]

    @contextmanager
    def _beside(self, job: JaxJob) -> Iterator[None]:
        """jax at its job while torch is at its own."""
        begun = False
        with self._noting("flax"):
            self._workers.jax.start(job)
            begun = True
        yield
        if begun:
            with self._noting("flax"):
                self._workers.jax.wait()

    @contextmanager
    def _noting(self, side: str) -> Iterator[None]:
        try:
            yield
        except ChildError as error:
            if side == "flax" and not error.trace:  # it died or hangs; one that raised goes on
                self._workers.end_jax()
            where = error.where if error.child == side else f"{error.child}, {error.where}"
            if (side, error.what) not in {(problem.side, problem.message) for problem in self.problems}:
                self.problems.append(Problem(side, where, error.what))

    def _path(self, name: str) -> Path:
        return self._scratch.path / name

    def _torch(self, name: str) -> Records:
        return torch_records(self._path(name), self.case.world_size)

    def _jax(self, name: str) -> Records:
        return jax_records(self._path(name))


def _first(records: Records, steps: int | None) -> Lazy[StoredRecord]:
    if steps is None:
        return records
    return Lazy(lambda: min(steps, len(records)), lambda index: records[index])
