"""Searches that fail, and that are ended early."""

import time
from typing import Any, cast

import pytest
import torch

from jaxddp.parity.diagnosis import interruptible
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches, OnRank
from jaxddp.parity.findings import Problem
from jaxddp.parity.processes import ChildError
from jaxddp.parity.stopping import Stopped
from torch_ref.distributed import World

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


def test_a_search_on_a_rank_tells_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "EVERY", 0.01)
    told: list[str] = []
    world, evidence = cast(World, None), cast(Evidence, "evidence")

    def search(given: object, seconds: float) -> object:
        time.sleep(seconds)
        return given, torch.get_default_dtype()

    assert OnRank(search, evidence, (0.2,)).run(world, told.append) == ("evidence", torch.float32)
    count = len(told)
    assert count > 1 and set(told) == {"the search for a cause"}
    time.sleep(0.05)
    assert len(told) == count


def test_a_stop_ends_a_search_and_all_that_follow() -> None:
    crew: Any = Crew()
    searches = InterruptibleSearches(crew, [])
    assert searches.run(lambda: raises(Stopped())) is None
    assert searches.ended and crew.ended == ["all"] and not searches.problems
    assert searches.run(lambda: raises(AssertionError("runs"))) is None
