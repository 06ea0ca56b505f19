"""Run searches for causes; any of them may fail or be ended early, and the report keeps what is known."""

from collections.abc import Callable
from typing import TypeVar

from jaxddp.parity.findings import Problem
from jaxddp.parity.processes import ChildError
from jaxddp.parity.progress import Progress
from jaxddp.parity.stopping import Stopped
from jaxddp.parity.workers import Workers

T = TypeVar("T")


class InterruptibleSearches:
    """Searches that run one after the other; a request to end early ends them all.

    Args:
        workers: processes in which hypotheses are replayed.
        problems: list to which errors that stop a search are appended.
        progress: progress of the check; None: it is not shown.

    Attributes:
        ended: whether such a request was made; no further search runs then.
    """

    def __init__(self, workers: Workers, problems: list[Problem], progress: Progress | None = None):
        self.workers, self.problems, self.progress = workers, problems, progress or Progress()
        self.ended = bool(self.progress.stop.why)

    def run(self, search: Callable[[], T], problems: list[Problem] | None = None) -> T | None:
        """Return the result of a search; None if it fails or is ended, or if an earlier one was ended.

        Args:
            search: the function to call.
            problems: list to which an error is appended, instead of the list of all searches.
        """
        if self.ended:
            return None
        try:
            with self.progress.stop.raising():
                return search()
        except ChildError as error:
            self.workers.end_after(error)
            side = "jax" if error.child.startswith("jax") else "torch"
            (self.problems if problems is None else problems).append(Problem(side, error.where, error.what))
        except Stopped:
            self.ended = True
            self.workers.end()
        return None
