"""InterruptibleSearches that fail, that take long, and that Ctrl-C ends."""

import queue
import time
from typing import Any

from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Problem
from jaxddp.parity.processes import ChildError

DIED = ChildError("torch rank 0", "the search for a cause", "died of SIGKILL")


class Crew:
    """Stand-in for workers that records how they are ended."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def end(self) -> None:
        self.ended.append("all")

    def end_after(self, error: ChildError) -> None:
        self.ended.append(error)


def raises(error: BaseException) -> Any:
    raise error


def test_a_search_that_fails_is_a_problem_and_the_next_one_runs() -> None:
    crew: Any = Crew()
    problems: list[Problem] = []
    searches = InterruptibleSearches(crew, problems)
    assert searches.run(lambda: raises(DIED)) is None
    assert searches.run(lambda: 3) == 3
    assert problems == [Problem("torch", "the search for a cause", "died of SIGKILL")]
    assert crew.ended == [DIED] and not searches.ended
    others: list[Problem] = []
    searches.run(lambda: raises(DIED), problems=others)
    assert others == problems and len(problems) == 1


def test_ctrl_c_ends_a_search_and_all_that_follow() -> None:
    crew: Any = Crew()
    searches = InterruptibleSearches(crew, [])
    assert searches.run(lambda: raises(KeyboardInterrupt())) is None
    assert searches.ended and crew.ended == ["all"] and not searches.problems
    assert searches.run(lambda: raises(AssertionError("runs"))) is None


def test_a_long_search_says_what_differs_and_how_to_end_it() -> None:
    crew: Any = Crew()
    told: queue.Queue[str] = queue.Queue()
    with InterruptibleSearches(crew, [], told.put, quiet=0.01).about("loss differs"):
        line = told.get(timeout=10)
    assert line == "loss differs: searching for the cause; Ctrl-C ends the search and prints what is known"
    quick = InterruptibleSearches(crew, [], told.put, quiet=0.2)
    with quick.about("loss differs"):
        assert quick.run(lambda: 3) == 3
    time.sleep(0.5)
    assert told.empty()
