"""Torch ranks in child processes, joined by DistributedDataParallel."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxddp.config.options import Platform
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.parity.case_interface import LOCAL_STAGES, AnyCase, Trajectory, micro_batches_of
from jaxddp.parity.processes import STARTING, Child, ChildError, Watch, answers, end_all
from jaxddp.parity.records import Records, Scratch, Tensors
from jaxddp.parity.sums import Summand
from jaxddp.parity.torch_side.rank import TorchJob, rank_folder, serve
from jaxddp.parity.torch_side.steps import Steps

# Stages that every rank records; the others are recorded by rank 0 only.
STACKED = (*LOCAL_STAGES, "local_norms", "local_projections", "samples", "local_buffers", "local_params")


class TorchPool:
    """Torch ranks that run job after job; a context manager that ends them.

    Args:
        size: number of ranks, the largest world size of any job.
        timeout: seconds without a message after which a rank counts as hanging.
        platform: "cpu" or "gpu".
        watch: see `answers`.

    Attributes:
        size: as above.

    Raises:
        ChildError: a rank raises, dies or hangs. All ranks are ended then, unless the job had one rank and it raised.
    """

    def __init__(
        self, size: int, timeout: float = 300.0, platform: Platform = "cpu", watch: Watch = lambda children: None
    ):
        self.size, self._platform = size, platform
        self._timeout, self._watch = timeout, watch
        self._ranks: list[Child] = []

    def __enter__(self) -> Self:
        self._scratch = Scratch()
        store_file = str(self._scratch.path / "store")
        self._ranks = [
            Child(f"torch rank {rank}", serve, (rank, self.size, self._platform, store_file))
            for rank in range(self.size)
        ]
        self._ready = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(patience=10.0 if error is None else 0.0)

    @property
    def alive(self) -> bool:
        """Return whether the ranks run; all end once one of them dies, hangs, or leaves others waiting."""
        return bool(self._ranks)

    def run(self, case: AnyCase, weights: Tensors, batches: Iterable[MicroBatches] | None = None) -> Trajectory:
        """Take the steps of a case and return their records.

        Args:
            case: model or port, world size, dtype and batches.
            weights: state_dict to start from.
            batches: batches that replace the case's, one per step.
        """
        steps = list(case.batches() if batches is None else batches)
        of_ranks = [[micro_batches_of(batch, rank) for batch in steps] for rank in range(case.world_size)]
        scratch = Scratch()
        source, world_size = case.torch_source, case.world_size
        self.do(Steps(source, case.dtype, world_size, len(steps), scratch.path, weights, batches=of_ranks))
        return Trajectory(weights, torch_records(scratch.path, world_size, owner=scratch))

    def do(self, job: TorchJob) -> list[Any]:
        """Run a job on the first `job.world_size` ranks and return their answers."""
        if not self._ready:
            self._answers(self._ranks, max(STARTING, self._timeout))
            self._ready = True
        ranks = self._ranks[: job.world_size]
        for rank in ranks:
            rank.give(job)
        return self._answers(ranks, self._timeout)

    def _answers(self, ranks: Sequence[Child], timeout: float) -> list[Any]:
        try:
            return answers(ranks, timeout, self._watch)
        except BaseException as error:
            raised = isinstance(error, ChildError) and bool(error.trace)
            if not raised or len(ranks) > 1:  # other ranks may wait for the one that raised
                self.end()
            raise

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the ranks to end, then kill them."""
        end_all(self._ranks, patience)
        self._ranks = []


def torch_records(folder: Path, world_size: int, owner: Any = None, summands: Sequence[Summand] = ()) -> Records:
    """Return the ranks' records: shared stages of rank 0, per-rank stages stacked.

    Args:
        folder: parent of the ranks' folders.
        world_size: number of ranks.
        owner, summands: see `Records`.
    """
    return Records([rank_folder(folder, rank) for rank in range(world_size)], STACKED, owner, summands)
