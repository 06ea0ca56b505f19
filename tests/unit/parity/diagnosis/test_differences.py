"""Details of a difference beside its cause."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxddp.parity.compare.judge import Judgement, Located
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis import differences as module
from jaxddp.parity.diagnosis.as_differences import CUT_SHORT, as_differences
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling
from jaxddp.parity.findings import Difference, NextBest
from jaxddp.parity.port import Facts
from jaxddp.parity.progress import Progress
from jaxddp.parity.stopping import Stop

EVIDENCE: Any = SimpleNamespace(judgement=Judgement(first={"local_loss": Located(3, "loss", 0.5, 1e-12, "of rank 1")}))


def test_a_difference_says_that_its_search_was_cut_short() -> None:
    near = Hypothesis((Deviation("label_smoothing", Statement("label_smoothing", value=0.1)),), 1e-3)
    for cut_short, detail in ((False, "of rank 1"), (True, f"of rank 1; {CUT_SHORT}")):
        (difference,) = as_differences(EVIDENCE, "local_loss", Ruling((), near, cut_short))
        assert (difference.stage, difference.step, difference.tensor) == ("local_loss", 3, "loss")
        assert (difference.cause, difference.detail) == (None, detail)
        assert difference.nearest == NextBest(near.deviations, 1e-3)


def test_the_search_for_a_loss_leaves_the_optimizer_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list[str]()
    stop = Stop(60.0, clock=lambda: now[0])
    crew: Any = SimpleNamespace(end=lambda: None)
    searches = InterruptibleSearches(crew, [], Progress(stop=stop))
    found = Difference("update", 1, "w", 1.0, 1e-12)

    def searching(name: str, differences: list[Difference]) -> Any:
        def search() -> None:
            calls.append(f"{name} {stop.left:.0f}")
            while name == "loss":
                now[0] += 1
                stop.poll()

        return lambda *_: searches.run(search) or differences

    monkeypatch.setattr(module, "_explain_optimizer", searching("optimizer", [found]))
    monkeypatch.setattr(module, "_explain_reduction", searching("step", []))
    monkeypatch.setattr(module, "_explain_model", searching("loss", [replace(found, stage="local_loss")]))
    first = {stage: Located(1, "w", 1.0, 1e-12) for stage in ("local_loss", "update")}
    evidence: Any = SimpleNamespace(
        judgement=Judgement(first=first, residuals={"update": []}), facts=Facts(), jax=[], torch=[]
    )
    of_loss, of_update = module.find_differences(evidence, searches)
    assert calls == ["optimizer 60", "step 60", "loss 60"] and searches.ended
    assert (of_loss.stage, of_update.stage) == ("local_loss", "update") and module.ENDED in of_loss.detail
