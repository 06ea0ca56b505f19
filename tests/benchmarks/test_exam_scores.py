"""Outcomes of the exam are kept, listed and printed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scoreboard import exam
from benchmarks.scoreboard.__main__ import ScoreboardOptions
from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.exam import OUTCOMES, ExamScore, examine, section, silent_list
from benchmarks.scoreboard.kept import Kept
from jaxddp.errors import InputError
from jaxddp.parity.findings import Difference, Problem, StageResult
from jaxddp.parity.report.report import Report
from tests.faults.exam import Mutant, equivalence
from tests.faults.exam.operators import Edit

MUTANT = Mutant("mine", "jax", Edit("number", 35, 54, 0, 0, 2, "64", "65"))
FILE, LINE = MUTANT.place
EQUAL = Report("port.py", 2, 3, "float64", {"update": StageResult(1e-12, (1e-15,))})
DIFFERENT = replace(EQUAL, differences=(Difference("update", 2, "fc.weight", 0.5, 1e-12),))
FAILED = replace(EQUAL, problems=(Problem("jax", "jax_loss", "KeyError: 'z'"),))
SCORE = ExamScore(MUTANT.name, "1 -> 2", "silent", "not proved: loss", 1.5)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExamScore]:
    """Return a function that examines a mutant with a given report, or error, and unproved parts."""

    def examine_with(report: Report | InputError, unproved: list[str] | None = None) -> ExamScore:
        def check(*_: Any, **settings: Any) -> Report:
            assert not settings["causes"] and not settings["numerics"]
            if isinstance(report, InputError):
                raise report
            return report

        monkeypatch.setattr(exam, "check", check)
        monkeypatch.setattr(equivalence, "unproved_parts", lambda _: unproved or [])
        no_workers: Any = None
        return examine(MUTANT, no_workers)

    return examine_with


@pytest.mark.parametrize(
    ("report", "unproved", "outcome", "said"),
    [
        (InputError("--steps 0"), [], "refused", "--steps 0"),
        (FAILED, [], "refused", "KeyError: 'z'"),
        (DIFFERENT, [], "different", "update, step 2, fc.weight"),
        (replace(EQUAL, idle=(f"no effect: a clip at {FILE}:{LINE}.",)), ["loss"], "remarked", "no effect: a clip"),
        (replace(EQUAL, idle=(f"no effect: a clip at {FILE}:{LINE}0.",)), ["loss"], "silent", "not proved: loss"),
        (EQUAL, [], "equivalent", "proved"),
        (EQUAL, ["loss", "start"], "silent", "not proved: loss, start"),
    ],
    ids=["error", "problem", "different", "remark", "other line", "equivalent", "silent"],
)
def test_a_mutant_has_the_outcome_that_its_report_and_the_proof_give(
    report: Report | InputError, unproved: list[str], outcome: str, said: str, examined: Callable[..., ExamScore]
) -> None:
    score = examined(report, unproved)
    assert score.outcome == outcome and outcome in OUTCOMES
    assert said in score.said
    assert (score.name, score.half, score.operator) == (MUTANT.name, "jax", MUTANT.edit.operator)


def test_an_outcome_is_kept_and_is_in_the_scoreboard(tmp_path: Path) -> None:
    Kept(tmp_path / "scores.jsonl").add(("exam", MUTANT.name), SCORE)
    kept = Kept(tmp_path / "scores.jsonl")
    assert kept.exam(("exam", MUTANT.name)) == SCORE and kept.exam(("exam", "another")) is None
    facts = dict.fromkeys(("command", "date", "hardware", "python", "jax", "flax", "optax", "torch"), "x")
    text = to_markdown({}, [], [], facts, {}, [SCORE])
    assert (
        "| mutants of correct ports | 1 | 0 refused, 0 different, 0 beyond, 0 remarked, 0 equivalent, 1 silent" in text
    )
    assert f"- {MUTANT.name}: `1 -> 2`: not proved: loss" in text
    assert "None is silent." in "\n".join(section([replace(SCORE, outcome="different")]))


def test_the_list_of_silent_mutants_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "silent.txt"
    path.write_text("# Silent mutants\ngone/jax/number/1:1/0\n")
    assert silent_list(path, [SCORE, replace(SCORE, outcome="refused")]) == f"# Silent mutants\n{MUTANT.name}\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.0}, "--share 0: must be above 0 and at most 1"),
        ({"share": 2.0}, "--share 2: must be above 0 and at most 1"),
        ({"silent": Path("silent.txt"), "share": 0.5}, "--silent: needs the whole exam"),
        ({"silent": Path("silent.txt"), "parts": ("mutants",)}, "--silent: needs the whole exam"),
    ],
)
def test_a_share_is_a_share_and_the_list_needs_the_whole_exam(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScoreboardOptions(**settings)
