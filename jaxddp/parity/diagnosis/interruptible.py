"""Run searches for causes; any of them may fail or be ended early, and the report keeps what is known."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxddp.errors import repeating
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.findings import Problem
from jaxddp.parity.processes import ChildError, Tell
from jaxddp.parity.progress import Progress
from jaxddp.parity.stopping import Stopped
from jaxddp.parity.torch_side.side import Source
from jaxddp.parity.workers import Workers
from torch_ref.distributed import World
from torch_ref.program import default_dtype

T = TypeVar("T")
EVERY = 30.0  # seconds between reports of a search on a rank, which counts as hanging after 300


@dataclass(frozen=True)
class OnRank:
    """A job that explains a stage on a torch rank, where the imports that torch's optimizers need are made already.

    Attributes:
        function: function of a module, of the evidence and further arguments.
        evidence, arguments: what it is called with.
        world_size: number of ranks that run the job.
    """

    function: Callable[..., Any]
    evidence: Evidence
    arguments: tuple[Any, ...]
    world_size: int = 1

    @property
    def source(self) -> Source:
        """Return the port's torch half."""
        return self.evidence.case.torch_source

    def run(self, world: World, tell: Tell) -> Any:
        """Return what the function returns; report to the parent that it is running, however long it takes."""
        tell("the search for a cause")
        with repeating(lambda _: tell("the search for a cause"), EVERY), default_dtype("float32"):
            return self.function(self.evidence, *self.arguments)


class InterruptibleSearches:
    """Searches that run one after the other; a request to end early ends them all.

    Args:
        workers: processes in which hypotheses are replayed.
        problems: list to which errors that stop a search are appended.
        progress: progress of the check; None: it is not shown.

    Attributes:
        ended: whether such a request was made; no further search runs then.
        spent: whether a search has used up its share of the time; no further one runs in that share.
    """

    def __init__(self, workers: Workers, problems: list[Problem], progress: Progress | None = None):
        self.workers, self.problems, self.progress = workers, problems, progress or Progress()
        self.ended = bool(self.progress.stop.why)
        self.spent = False

    @contextmanager
    def share(self, parts: int) -> Iterator[None]:
        """Within the `with` statement, let searches take one of so many parts of the time that is left, if limited."""
        with self.progress.stop.share(parts):
            yield
        self.spent = False

    def run(self, search: Callable[[], T], problems: list[Problem] | None = None) -> T | None:
        """Return the result of a search; None if it fails or is ended, or if an earlier one was ended.

        Args:
            search: the function to call.
            problems: list to which an error is appended, instead of the list of all searches.
        """
        if self.ended or self.spent:
            return None
        try:
            with self.progress.stop.raising():
                return search()
        except ChildError as error:
            self.workers.end_after(error)
            side = "jax" if error.child.startswith("jax") else "torch"
            told = Problem(side, error.where, error.what, frames=error.frames, trace=error.trace)
            (self.problems if problems is None else problems).append(told)
        except Stopped:
            self.spent = self.progress.stop.spent
            self.ended = not self.spent
            self.workers.end()
        return None

    def on_rank(self, function: Callable[..., T], evidence: Evidence, *arguments: Any) -> T | None:
        """Return what a function returns on a torch rank; None if it fails or is ended. See `OnRank`."""
        result: T | None = self.run(lambda: self.workers.torch.do(OnRank(function, evidence, arguments))[0])
        return result
