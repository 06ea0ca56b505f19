"""Text of a report, words that the text shares with the page, and JSON."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.parity.deviation import Statement
from jaxddp.parity.findings import ORDER, Difference, StageResult
from jaxddp.parity.report import console, json_form, page, words
from jaxddp.parity.report.report import Report
from tests.support.report_cases import (
    ALONE,
    EQUAL,
    INCOMPLETE,
    LOCATED,
    MEASURED,
    NOT_FINITE,
    NUMERIC,
    SAMPLES,
    SEMANTIC,
    UNEXPLAINED,
)

every_sample = pytest.mark.parametrize("report", SAMPLES.values(), ids=SAMPLES)

# Text


@every_sample
def test_text_is_short_and_printable(report):
    lines = console.to_text(report).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= console.LINE
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EQUAL, ["optimizer state     6e-16      8    1e-12  equal                fc.weight"]),
        (EQUAL, ["equal: Nothing differs in 11 stages"]),
        (SEMANTIC, ["different: The update differs, first at step 1 in fc.weight: residual 6.6e-4, allowed 1e-12"]),
        (SEMANTIC, ["  cause  weight decay 0.0001, the reference has 0.01  [decay_value]", "  fix    set it explicit"]),
        (
            SEMANTIC,
            ["  proof  planted in the reference: residual 2e-15; next best: label smoothing 0.1, residual 3e-4"],
        ),
        (MEASURED, ["  proof  measured: the replicas' start differs by 0.1 in fc.weight"]),
        (ALONE, ["  proof  planted in the reference: residual 2e-15; without a fault: residual 6.6e-4"]),
        (UNEXPLAINED, ["  cause  unexplained", "  layer  blocks.0.gelu (jax: blocks_0/gelu)", "not seen"]),
        (
            LOCATED,
            [
                "  cause  no name; in one micro-batch, these operations of the loss get equal inputs and give other",
                "  differ jax, port.py:23: mul 0.5, tanh, mul gives -0.17004",
                "         torch, model.py:19: gelu gives -0.16992",
                "         in 3 places",
                "  differ jax, port.py:23: nothing\n         torch, model.py:19: mul 2.82843\n",
            ],
        ),
        (NUMERIC, ["different in rounding: ", "gradients            3e-6      2     3e-7  rounds differently"]),
        (
            INCOMPLETE,
            ["incomplete: Not everything could be compared. ", "problem: jax: step 3", "problem: port: jax_"],
        ),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_text_contains_stages_causes_and_problems(report, expected):
    text = console.to_text(report)
    for line in expected:
        assert line in text


def test_many_differences_and_problems_are_counted():
    differences = tuple(dataclasses.replace(SEMANTIC.differences[0], stage=stage) for stage in ORDER)
    report = dataclasses.replace(SEMANTIC, differences=differences, problems=INCOMPLETE.problems * 4)
    text = console.to_text(report)
    assert text.count("\ndifferent: ") == len(ORDER)
    assert text.count("  fix  ") == console.MOST_DIFFERENCES
    assert "problem: and 5 others" in text


def test_numbers_that_are_not_finite_on_one_side_are_told_without_a_residual():
    text = console.to_text(NOT_FINITE)
    first = "different: The local gradients are finite in torch and not in jax, first at step 4 in all tensors\n"
    assert f"\n\n{first}  the loss is finite, so they arise in its derivative\ndifferent: The update" in text
    html = page.to_html(NOT_FINITE)
    assert "The local gradients are finite in torch and not in jax" in html
    assert not {word for word in ("residual inf", "unexplained") if word in text.lower() + html.lower()}


def test_a_problem_that_leads_is_told_before_the_differences():
    leading = dataclasses.replace(INCOMPLETE.problems[0], leads=True)
    report = dataclasses.replace(SEMANTIC, problems=(INCOMPLETE.problems[1], leading))
    for text, pieces in (
        (console.to_text(report), ("problem: jax: step 3", "different: ", "problem: port: ")),
        (page.to_html(report), ("hangs: no answer", '<section class="card', "jax_restore: ")),
    ):
        places = [text.index(piece) for piece in pieces]
        assert places == sorted(places)


def test_causes_at_one_place_are_shown_together():
    (first,) = SEMANTIC.differences[:1]
    eps = dataclasses.replace(first.cause.deviations[0], what=Statement("norm_epsilon", norm="RMSNorm", value=1e-6))
    second = dataclasses.replace(first, cause=dataclasses.replace(first.cause, deviations=(eps,)))
    text = console.to_text(dataclasses.replace(SEMANTIC, differences=(first, second)))
    assert text.count("\ndifferent: ") == text.count("  proof  ") == 1
    assert "  and    RMSNorm eps 1e-06  [" in text
    assert "  proof  planted together in the reference: " in text


@pytest.mark.parametrize("middle", [10_000 * "x", " ".join(f"word{n}word" for n in range(1000))])
def test_a_long_message_is_cut_between_words_and_says_where_it_stands_in_full(middle):
    problem = dataclasses.replace(INCOMPLETE.problems[0], message=f"begin {middle} end")
    report = dataclasses.replace(INCOMPLETE, problems=(problem,))
    text = console.to_text(report)
    assert len(text.splitlines()) <= 25
    (told,) = re.findall(r"problem: (.*) \[in full: --report, --json\]", " ".join(text.split()))
    words_told = told.split()
    assert "..." in words_told and {*words_told} - {"..."} <= {*str(problem).split()}
    assert "begin" in words_told and words_told[-1] == "end"
    assert middle in json_form.to_json(report) and middle in page.to_html(report)


def test_table_yields_each_row_as_soon_as_it_is_checked():
    made = []

    def rows():
        for size in (1, 8):
            made.append(size)
            residuals = dict.fromkeys(ORDER, 9e-16)
            yield console.Row("char_mlp", "adagrad", "accumulation, clipping", size, residuals, "equal", 2.5)

    lines = console.table(rows())
    heading = next(lines)
    assert made == []
    first = next(lines)
    assert made == [1]
    rest = list(lines)
    assert len({len(heading), len(first), len(rest[0])}) == 1
    assert len(heading) <= 120
    for column in console.COLUMNS:
        end = heading.index(f" {column} ") + len(column) + 1
        assert first[:end].endswith(" 9e-16")
    assert rest[-1] == "2 checks, all equal, 5.0 s; the largest residual is 9e-16"


def test_table_summary_names_the_checks_that_are_not_equal():
    residuals = {"update": 0.1, "samples": 0.0, "hyperparameters": math.inf}
    different = console.Row("mlp", "adam", "", 2, residuals, "different")
    incomplete = console.Row("mlp", "sgd", "clipping", 4, {}, "incomplete")
    lines = list(console.table([console.Row("mlp", "sgd", "", 1), different, incomplete]))
    assert lines[-1] == "3 checks, 2 not equal, 0.0 s: mlp adam x2, mlp sgd clipping x4"
    assert re.search(r" 2 +inf +- +- +- +- +0\.1 +- +- +- different ", lines[2])
    assert list(console.table([]))[-1] == "nothing was checked"


# The words of the text and the page


def test_status_of_a_stage():
    stages = {
        "gradients": StageResult(1e-12, (1e-16, 1e-11)),
        "update": StageResult(1e-12, (math.nan, 1e-16)),
        "params": StageResult(1e-12, (math.nan, math.nan)),
    }
    differences = (Difference("samples", 1, "ids", math.inf, 0.0), Difference("buffers", 1, "x", 1.0, 0.1, "numeric"))
    report = Report("p.py", 2, 2, "float64", stages, unseen=("clipped_gradients",), differences=differences)
    status = words.Status
    wanted = {
        "samples": status.DIFFERENT,
        "buffers": status.NUMERIC,
        "gradients": status.FOLLOWS,
        "clipped_gradients": status.UNSEEN,
        "update": status.EQUAL,
        "params": status.ABSENT,
        "local_loss": status.ABSENT,
    }
    assert {stage: words.status(report, stage) for stage in wanted} == wanted
    assert words.verdict_word(report) == "different"
    assert words.verdict_word(dataclasses.replace(report, differences=differences[1:])) == "different in rounding"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"input_residual": 3e-16}, "the layer itself differs"),
        ({"input_residual": 1e-3}, "already differs (1e-3): look between this layer and blocks.0.norm1"),
        (
            {"input_residual": 1.4, "columns": ((63, 318), (0, 62))},
            "torch's channels in another order, 63 to 318, 0 to 62: look between this layer and blocks.0.norm1",
        ),
        ({"input_residual": 1e-3, "before": ""}, "the model's input"),
        ({"input_residual": None}, "comes after blocks.0.norm1"),
        (
            {"input_residual": 0.0, "torch": "", "jax": ""},
            "look after blocks.0.norm1, the last of them; or in the loss",
        ),
        ({"input_residual": 0.0, "torch": "", "jax": "", "before": ""}, "the layer itself differs"),
    ],
    ids=str,
)
def test_blame_depends_on_the_input_of_the_layer(changed, expected):
    layer = dataclasses.replace(UNEXPLAINED.differences[0].layer, **changed)
    assert expected in words.blame(layer, 1e-12)


def test_a_difference_of_the_models_own_output_has_a_name():
    difference = UNEXPLAINED.differences[0]
    layer = dataclasses.replace(difference.layer, torch="", jax="")
    report = dataclasses.replace(UNEXPLAINED, differences=(dataclasses.replace(difference, layer=layer),))
    assert "layer  the model's output: -0.169" in str(report)
    assert "(jax: )" not in str(report) and "diverges at the model's output." in words.sentence(report)


# JSON


@every_sample
def test_json_round_trip_keeps_every_bit(report):
    text = json_form.to_json(report)
    text.encode("ascii")
    decoded = json_form.from_json(text)
    assert repr(decoded) == repr(report)  # NaN is not equal to itself; repr shows every bit and type
    assert json_form.to_json(decoded) == text


def test_json_accepts_numpy_numbers():
    result = StageResult(np.float32(0.1), (np.float64(1e-16), np.inf), {"w": ((np.int64(3),), 0)})
    decoded = json_form.from_json(json_form.to_json(Report("p.py", 2, 1, "float64", {"update": result})))
    assert decoded.stages["update"] == result
    assert type(decoded.stages["update"].tensors["w"][1]) is float


def malformed(**changed) -> str:
    return json.dumps({**json.loads(json_form.to_json(SEMANTIC)), **changed})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format is None"),
        (malformed(format="jaxddp.parity report 1"), "must be 'jaxddp.parity report 9'"),
        (malformed(more=1), r"report: fields are .*more; must be port, "),
        (malformed(steps="10"), "report.steps: is '10'; must be of type int"),
        (malformed(seconds="NaN"), "report.seconds: is 'NaN'; must be of type float"),
        (malformed(losses=[[1.0]]), r"report.losses\[0\]: has 1 entries; must have 2"),
        (malformed(stages={"update": None}), "report.stages.update: is None; must be of type dict"),
    ],
    ids=lambda value: value[:30],
)
def test_malformed_json_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        json_form.from_json(text)


def test_a_cause_that_was_not_sought_is_told_with_what_it_needs():
    difference = Difference("local_loss", 1, "loss", 0.1, 1e-5, needs="a program")
    report = Report("torch_run jax_run", 2, 10, "float32", differences=(difference,))
    assert "cause  not sought: it needs a program" in str(report)
    assert "its cause needs a program" in page.to_html(report)
    assert "unexplained" not in str(report)
