"""Details of a difference beside its cause."""

from types import SimpleNamespace
from typing import Any

from jaxddp.parity.compare.judge import Judgement, Located
from jaxddp.parity.diagnosis.as_differences import CUT_SHORT, as_differences
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling

EVIDENCE: Any = SimpleNamespace(judgement=Judgement(first={"local_loss": Located(3, "loss", 0.5, 1e-12, "of rank 1")}))


def test_a_difference_says_that_its_search_was_cut_short() -> None:
    near = Hypothesis(("label_smoothing",), "label smoothing 0.1", 1e-3)
    for cut_short, detail in ((False, "of rank 1"), (True, f"of rank 1; {CUT_SHORT}")):
        (difference,) = as_differences(EVIDENCE, "local_loss", Ruling((), near, cut_short))
        assert (difference.stage, difference.step, difference.tensor) == ("local_loss", 3, "loss")
        assert (difference.cause, difference.detail) == (None, detail)
        assert difference.nearest == ("label smoothing 0.1", 1e-3)
