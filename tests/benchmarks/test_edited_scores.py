"""Scores of causes of mutants: the edited line, names, sizes of segments and patches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.edited import EditedScore, counts, scored
from benchmarks.scoreboard.kept import Kept
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import Cause, Difference, Patch, Segment
from jaxddp.parity.quote import Quote
from jaxddp.parity.report.report import Report
from tests.faults.exam import COUNTS, chosen, further_mutants

MUTANT = next(mutant for mutant in further_mutants(20) if mutant.half == "jax")
FILE, LINE = MUTANT.place
EDITED, OTHER = Quote(FILE, LINE), Quote(FILE, LINE + 1)
SEGMENT = Segment(("reduce_max",), ("mean",), OTHER, None, (), (0.0, 0.0), 1)
CAUSE = Cause(
    (Deviation("other_function", Statement("other_function", jax="amax", torch="mean", of="")),),
    0.0,
    None,
    "",
    EDITED,
    None,
)
DIFFERENCE = Difference(
    "local_loss", 1, "loss", 0.1, 1e-12, cause=CAUSE, segments=(SEGMENT,), patch=Patch("equal", "- a\n+ b\n")
)


def score_of(*differences: Difference) -> EditedScore:
    return scored(MUTANT, Report("port.py", 2, 3, "float64", {}, differences=differences), 9.0)


def test_further_mutants_are_others_than_those_of_the_exam() -> None:
    of_exam = {(mutant.port, mutant.text) for half in COUNTS for mutant in chosen(half)}
    mutants = further_mutants(40)
    assert len({mutant.name for mutant in mutants}) == 40 and mutants[:20] == further_mutants(20)
    assert of_exam.isdisjoint((mutant.port, mutant.text) for mutant in mutants)


def test_a_report_with_the_edited_line_a_name_and_a_patch_has_them_all() -> None:
    score = score_of(DIFFERENCE)
    assert (score.named, score.line, score.largest, score.patched, score.in_loss) == (True, True, 1, True, True)
    assert counts([score]) == (
        "1 different, 1 with the edited line, 1 in at most 4 calls of torch, 1 named, 1 equal with the patch"
    )


@pytest.mark.parametrize(
    ("change", "small"),
    [
        ({}, True),
        ({"segments": (), "patch": None}, True),  # a name of what no call shows
        ({"segments": (), "cause": None}, False),  # nothing was located
        ({"segments": (), "cause": None, "stage": "update"}, True),  # an optimizer has no segments
    ],
)
def test_a_loss_without_a_name_and_a_segment_is_not_located(change: dict[str, Any], small: bool) -> None:
    assert score_of(replace(DIFFERENCE, **change)).small == small


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({"cause": replace(CAUSE, jax=OTHER)}, "line"),
        ({"cause": None, "jax": EDITED}, "named"),
        ({"cause": replace(CAUSE, deviations=(Deviation("other_expression", CAUSE.deviations[0].what),))}, "named"),
        ({"patch": Patch("gone", "- a\n+ b\n", others=1)}, "patched"),
        ({"stage": "update"}, "in_loss"),
    ],
    ids=["another line", "no cause", "an expression", "a patch that leaves others", "the optimizer"],
)
def test_each_is_counted_by_itself(change: dict[str, object], lacking: str) -> None:
    score = score_of(replace(DIFFERENCE, **change))
    assert [name for name in ("named", "line", "patched", "in_loss") if not getattr(score, name)] == [lacking]


def test_scores_are_kept_and_written(tmp_path: Path) -> None:
    score = score_of(DIFFERENCE)
    Kept(tmp_path / "scores.jsonl").add(("edited", score.name), score)
    assert Kept(tmp_path / "scores.jsonl").edited(("edited", score.name)) == score
    about = dict.fromkeys(("command", "date", "hardware", "python", "jax", "flax", "optax", "torch"), "-")
    text = to_markdown({}, (), (), about, {}, edited=[score])
    assert "## Causes of edits" in text and f"`{score.edit}`" in text
