"""What a verdict covers beside the run's steps: exit codes, sentences and lines."""

from dataclasses import replace

import pytest

from jaxddp.parity.coverage import Aspect, Beyond, Trial, WithoutEffect
from jaxddp.parity.deviation import Statement
from jaxddp.parity.findings import Difference, Problem, StageResult
from jaxddp.parity.quote import Quote
from jaxddp.parity.report.json_form import from_json, to_json
from jaxddp.parity.report.page import to_html
from jaxddp.parity.report.report import Report

LARGE = Trial("gradients", "with gradients 1000 times as large")
SMALL = Trial("gradients", "with gradients 1000 times as small")
REPLICAS = Trial("replicas", "with 3 replicas", "jax_step raises")
CLIPS = Statement("operation_of_one_side", code="clip_by_global_norm(100)", of="jax")
CLIP = Beyond(LARGE, "update", "0.weight", 0.9, 1e-12, (CLIPS,), Quote("port.py", 17))
WIDER = "0.weight: torch uniform, deviation 0.24; jax normal, 5."
INITIALISATION = Aspect("differs", (WIDER,), 41.0, 0, 7.0, "0.weight")
EQUAL = Report("port.py", 2, 1, "float64", {"update": StageResult(1e-12, (3e-16,))}, trials=(LARGE, SMALL, REPLICAS))
BEYOND = replace(EQUAL, beyond=(CLIP,))


def test_a_difference_outranks_what_was_not_compared_and_both_outrank_beyond() -> None:
    problem, difference = Problem("jax", "step 1", "failed"), Difference("update", 1, "0.weight", 0.1, 1e-12)
    assert [EQUAL.verdict, BEYOND.verdict] == ["equal", "beyond"]
    assert replace(BEYOND, problems=(problem,)).verdict == "incomplete"
    assert replace(BEYOND, problems=(problem,), differences=(difference,)).verdict == "different"


@pytest.mark.parametrize(
    ("report", "codes"),
    [
        (EQUAL, (0, 0)),
        (BEYOND, (0, 1)),
        (replace(BEYOND, intended={"gradients": "as in the paper"}), (0, 0)),
        (replace(BEYOND, intended={"initialisation": "as in the paper"}), (0, 1)),
        (replace(EQUAL, aspects={"initialisation": INITIALISATION}), (0, 1)),
        (replace(EQUAL, aspects={"initialisation": INITIALISATION}, intended={"initialisation": "smaller"}), (0, 0)),
        (replace(EQUAL, aspects={"initialisation": Aspect("not compared", ("No seed reaches it.",))}), (0, 0)),
        (replace(BEYOND, ended="Ctrl-C"), (2, 2)),
        (replace(BEYOND, differences=(Difference("update", 1, "0.weight", 0.1, 1e-12),)), (1, 1)),
    ],
)
def test_strict_accepts_only_what_is_intended(report: Report, codes: tuple[int, int]) -> None:
    assert (report.exit_code(), report.exit_code(strict=True)) == codes


def test_the_report_says_what_differs_beyond_the_run_and_what_was_not_tried() -> None:
    text = " ".join(str(BEYOND).split())
    assert "beyond: Nothing differs in 1 stage of 1 step" in text
    assert "Equal beyond the run too, in 1 trial (gradients)." in text
    assert "Not tried beyond the run: 3 replicas, since jax_step raises." in text
    line = "beyond this run, with gradients 1000 times as large: the update differs in 0.weight, residual 0.9: "
    assert f"{line}clip_by_global_norm(100) at port.py:17; the reference has none" in text
    assert "beyond this run," not in str(EQUAL)


def test_an_initialisation_that_differs_is_a_row_and_in_the_sentence_with_the_reason() -> None:
    report = replace(EQUAL, aspects={"initialisation": INITIALISATION})
    assert ["initialisation", "41", "-", "7", "differs", "0.weight"] in [*map(str.split, str(report).splitlines())]
    assert WIDER in " ".join(str(report).split())
    intended = replace(report, intended={"initialisation": "as in the paper"})
    assert "(intended: as in the paper)" in " ".join(str(intended).split())


def test_a_sentence_on_an_aspect_that_is_also_a_remark_is_printed_once() -> None:
    says = "The types of torch's moments were not compared: ValueError."
    report = replace(EQUAL, aspects={"types": Aspect("equal", (says,))}, idle=(says,))
    assert " ".join(str(report).split()).count(says) == 1


def test_at_most_ten_operations_without_effect_are_printed_and_all_are_in_the_page() -> None:
    idle = tuple(WithoutEffect("jax", f"clip {k}", "never clips", Quote("port.py", k)) for k in range(1, 13))
    report = replace(EQUAL, without_effect=idle)
    lines = [line for line in str(report).splitlines() if line.startswith("without effect")]
    assert len(lines) == 11 and "2 further operations" in lines[-1]
    assert all(f"clip {k} at" in to_html(report) for k in range(1, 13))


def test_the_page_and_the_file_hold_all_of_it() -> None:
    report = replace(BEYOND, aspects={"initialisation": INITIALISATION}, intended={"gradients": "on purpose"})
    page = to_html(report)
    assert "Beyond the run" in page and "Outside of the steps" in page and "on purpose" in page
    assert from_json(to_json(report)) == report
