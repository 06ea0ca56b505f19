"""What is said of a difference, beside its cause."""

from types import SimpleNamespace
from typing import Any

from jaxddp.parity.compare.judge import Judgement, Located
from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling
from jaxddp.parity.diagnosis.explain import CUT_SHORT, _told

EVIDENCE: Any = SimpleNamespace(judgement=Judgement(first={"local_loss": Located(3, "loss", 0.5, 1e-12, "of rank 1")}))


def test_a_search_that_was_cut_short_is_told_with_the_difference() -> None:
    near = Hypothesis(("label_smoothing",), "label smoothing 0.1", 1e-3)
    for cut_short, detail in ((False, "of rank 1"), (True, f"of rank 1; {CUT_SHORT}")):
        (found,) = _told(EVIDENCE, "local_loss", Ruling((), near, cut_short))
        assert (found.stage, found.step, found.tensor, found.cause) == ("local_loss", 3, "loss", None)
        assert found.detail == detail
        assert found.nearest == ("label smoothing 0.1", 1e-3)
