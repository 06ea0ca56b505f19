"""Searches for causes, any of which may fail, or be ended by Ctrl-C, while the report keeps what is known."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from jaxddp.parity.findings import Problem
from jaxddp.parity.processes import ChildError
from jaxddp.parity.workers import Workers

T = TypeVar("T")
QUIET = 10.0  # seconds of searching without a word


class InterruptibleSearches:
    """InterruptibleSearches that run one after the other; Ctrl-C ends them all.

    Args:
        workers: processes in which hypotheses are replayed.
        problems: list to which errors that stop a search are appended.
        tell: is called with a line if the searches take longer than `quiet` seconds; None: nothing is told.
        quiet: seconds.

    Attributes:
        ended: True after Ctrl-C; no further search runs.
    """

    def __init__(
        self,
        workers: Workers,
        problems: list[Problem],
        tell: Callable[[str], None] | None = None,
        quiet: float = QUIET,
    ):
        self.workers, self.problems, self.ended = workers, problems, False
        self._tell, self._quiet = tell or (lambda line: None), quiet

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """Tell what differs, in words, if the searches within the `with` statement take long."""
        line = f"{what}: searching for the cause; Ctrl-C ends the search and prints what is known"
        timer = threading.Timer(self._quiet, self._tell, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def run(self, search: Callable[[], T], problems: list[Problem] | None = None) -> T | None:
        """Return what a search finds; None if it fails or is ended, or if one before it was ended.

        Args:
            search: is called.
            problems: list to which an error is appended, instead of the list of all searches.
        """
        if self.ended:
            return None
        try:
            return search()
        except ChildError as error:
            self.workers.end_after(error)
            side = "jax" if error.child.startswith("jax") else "torch"
            (self.problems if problems is None else problems).append(Problem(side, error.where, error.what))
        except KeyboardInterrupt:
            self.ended = True
            self.workers.end()
        return None
