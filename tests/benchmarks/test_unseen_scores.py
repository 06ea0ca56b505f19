"""Scores of the exam by an author who does not know the check: names, lines and sizes of segments."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.unseen import UnseenScore, questions, scored
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import Cause, Difference, Segment
from jaxddp.parity.quote import Quote
from jaxddp.parity.report.report import Report
from tests.faults.unseen import UNSEEN
from tests.faults.unseen.fault import edited, source

FAULT = UNSEEN["convnext/pooled_maximum"]
JAX, TORCH = (
    next(number for number, line in enumerate(text.splitlines(), 1) if snippet in line)
    for text, snippet in (
        (edited(FAULT.port, FAULT), FAULT.jax_lines[0]),
        (source(FAULT.port, "torch"), FAULT.torch_lines[0]),
    )
)
LINES = Quote("convnext_jax.py", JAX), Quote("convnext_torch.py", TORCH)
SEGMENT = Segment(("reduce_max",), ("mean",), *LINES, (), (0.0, 0.0), 1, "max(x)", "mean(x)")
LEFT_OUT = Deviation("other_function", Statement("call_left_out", call="softmax", by="", of=""))
RIGHT = Cause(
    (Deviation("other_function", Statement("other_function", jax="amax", torch="mean", of="")),), 0.0, None, "", *LINES
)
DIFFERENCE = Difference("local_loss", 1, "loss", 0.1, 1e-12, cause=RIGHT, segments=(SEGMENT,))
SCORE = UnseenScore("a", "different", True, False, True, True, 1, (9.0, 2.0), ("amax instead of mean",))


def score_of(*differences: Difference) -> UnseenScore:
    return scored("a", [FAULT], Report("port.py", 2, 4, "float64", {}, differences=differences), 9.0)


def test_a_cause_with_the_words_and_lines_of_the_fault_is_right() -> None:
    score = score_of(DIFFERENCE)
    assert (score.named, score.wrong, score.jax_line, score.torch_line, score.largest) == (True, False, True, True, 1)
    assert score.located


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (replace(DIFFERENCE, cause=replace(RIGHT, deviations=(LEFT_OUT,)), segments=()), "wrong"),
        (replace(DIFFERENCE, cause=None), "not named"),
        (replace(DIFFERENCE, segments=(replace(SEGMENT, torch=("mul",) * 5),)), "large"),
        (replace(DIFFERENCE, cause=replace(RIGHT, jax=Quote("convnext_jax.py", 1)), segments=()), "line"),
    ],
    ids=["other words", "no cause", "a large segment", "another line"],
)
def test_anything_else_is_not(difference: Difference, expected: str) -> None:
    score = score_of(difference)
    assert score.wrong == (expected == "wrong")
    assert score.named == (expected in ("large", "line"))
    assert score.located == (expected in ("wrong", "not named"))


def test_a_second_cause_must_be_right_too() -> None:
    other = replace(DIFFERENCE, cause=replace(RIGHT, deviations=(LEFT_OUT,)), segments=())
    score = score_of(DIFFERENCE, other)
    assert score.wrong and not score.named


def test_a_score_is_kept_and_is_in_the_scoreboard(tmp_path: Path) -> None:
    Kept(tmp_path / "scores.jsonl").add(("unseen", "a"), SCORE)
    assert Kept(tmp_path / "scores.jsonl").unseen(("unseen", "a")) == SCORE
    facts = dict.fromkeys(("command", "date", "hardware", "python", "jax", "flax", "optax", "torch"), "x")
    text = to_markdown({}, [], [], facts, {}, unseen=[SCORE, replace(SCORE, named=False, wrong=True, largest=5)])
    assert "| ports by an author who does not know the check | 2 | 2 found, 1 named, 1 named wrongly" in text
    assert "| unseen faults | wrong | 0 | 1 of 2 |" in text
    assert "| unseen faults | segments of at most 4 calls | all | 1 of 2 |" in text
    assert "| a | **wrong** | jax and torch | 5 | 2.0 | amax instead of mean |" in text


def test_every_fault_and_pair_is_asked() -> None:
    assert len(questions()) == 75 and questions()["decoder/rotary_base+silu_on_up"][1] == "decoder/silu_on_up"
