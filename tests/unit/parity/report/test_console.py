"""What a terminal shows of a check, the words for it, and the JSON file."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.parity.findings import ORDER, Difference, StageResult
from jaxddp.parity.report import console, data, words
from jaxddp.parity.report.report import Report
from tests.support.report_cases import EQUAL, INCOMPLETE, NUMERIC, SAMPLES, SEMANTIC, UNEXPLAINED

every_sample = pytest.mark.parametrize("report", SAMPLES.values(), ids=SAMPLES)

# The terminal


@every_sample
def test_text_is_short_and_harmless(report):
    lines = console.to_text(report).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= console.LINE
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (EQUAL, ["optimizer state     6e-16      2    1e-12  equal                fc.weight", "equal: In 10 stages"]),
        (SEMANTIC, ["different: The update differs, first at step 1 in fc.weight: 6.6e-4, allowed 1e-12"]),
        (
            SEMANTIC,
            ["  cause  weight decay 0.0001, the reference has 0.01  [decay_value]", "  fix    give it explicitly"],
        ),
        (SEMANTIC, ["  proof  planted in the reference, it leaves 2e-15; the next best, decay_mask, leaves 3e-4"]),
        (UNEXPLAINED, ["  cause  unexplained", "  layer  blocks.0.gelu (flax: blocks_0/gelu)", "not seen"]),
        (NUMERIC, ["different in rounding: ", "gradients            3e-6      2     3e-7  rounds differently"]),
        (
            INCOMPLETE,
            ["incomplete: Not all could be compared. ", "problem: flax: step 3", "problem: port: flax_restore"],
        ),
    ],
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_text_tells(report, told):
    text = console.to_text(report)
    for words_told in told:
        assert words_told in text


def test_many_differences_and_problems_are_counted():
    differences = tuple(dataclasses.replace(SEMANTIC.differences[0], stage=stage) for stage in ORDER)
    report = dataclasses.replace(SEMANTIC, differences=differences, problems=INCOMPLETE.problems * 4)
    text = console.to_text(report)
    assert text.count("\ndifferent: ") == len(ORDER)
    assert text.count("  fix  ") == console.MOST_DIFFERENCES
    assert "problem: and 5 others" in text


def test_causes_of_one_place_stand_together():
    (found,) = SEMANTIC.differences[:1]
    assert found.cause is not None
    other = dataclasses.replace(found, cause=dataclasses.replace(found.cause, says=("eps 1e-6",)))
    text = console.to_text(dataclasses.replace(SEMANTIC, differences=(found, other)))
    assert text.count("\ndifferent: ") == 1 and text.count("  proof  ") == 1 and "they leave together" in text
    assert "  and    eps 1e-6  [" in text


def test_long_messages_are_shortened():
    problem = dataclasses.replace(INCOMPLETE.problems[0], message=f"begin {10_000 * 'x'} end")
    lines = console.to_text(dataclasses.replace(INCOMPLETE, problems=(problem,))).splitlines()
    assert len(lines) <= 25
    assert "begin" in lines[-6]
    assert lines[-2].endswith("end")


def test_table_is_printed_as_it_is_made():
    made = []

    def rows():
        for size in (1, 8):
            made.append(size)
            yield console.Row(
                "char_mlp", "adagrad", "accumulation, clipping", size, dict.fromkeys(ORDER, 9e-16), "equal", 2.5
            )

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


def test_table_names_what_is_not_equal():
    different = console.Row(
        "mlp", "adam", "", 2, {"update": 0.1, "samples": 0.0, "hyperparameters": math.inf}, "different"
    )
    incomplete = console.Row("mlp", "sgd", "clipping", 4, {}, "incomplete")
    lines = list(console.table([console.Row("mlp", "sgd", "", 1), different, incomplete]))
    assert lines[-1] == "3 checks, 2 not equal, 0.0 s: mlp adam x2, mlp sgd clipping x4"
    assert re.search(r" 2 +inf +- +- +- +- +0\.1 +- +- +- different ", lines[2])
    assert list(console.table([]))[-1] == "nothing was checked"


# What both are made of


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
    ("changed", "told"),
    [
        ({"input_residual": 3e-16}, "the layer itself differs"),
        ({"input_residual": 1e-3}, "differs already (1e-3): look between it and blocks.0.norm1"),
        ({"input_residual": 1e-3, "before": ""}, "the model's input"),
        ({"input_residual": None}, "comes after blocks.0.norm1"),
    ],
    ids=str,
)
def test_blame(changed, told):
    layer = dataclasses.replace(UNEXPLAINED.differences[0].layer, **changed)
    assert told in words.blame(layer, 1e-12)


# JSON


@every_sample
def test_json_brings_back_every_bit(report):
    text = data.to_json(report)
    text.encode("ascii")
    found = data.from_json(text)
    assert repr(found) == repr(report)  # NaN is not equal to itself; repr shows every bit and type
    assert data.to_json(found) == text


def test_json_takes_numpys_numbers():
    result = StageResult(np.float32(0.1), (np.float64(1e-16), np.inf), {"w": ((np.int64(3),), 0)})
    found = data.from_json(data.to_json(Report("p.py", 2, 1, "float64", {"update": result})))
    assert found.stages["update"] == result
    assert type(found.stages["update"].tensors["w"][1]) is float


def spoiled(**changed) -> str:
    return json.dumps({**json.loads(data.to_json(SEMANTIC)), **changed})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "its format is None"),
        (spoiled(format="jaxddp.parity report 2"), "should be 'jaxddp.parity report 1'"),
        (spoiled(more=1), r"report: its fields should be port, .*more"),
        (spoiled(steps="10"), "report.steps: is '10', and should be of type int"),
        (spoiled(seconds="NaN"), "report.seconds: is 'NaN', and should be of type float"),
        (spoiled(losses=[[1.0]]), r"report.losses\[0\]: has 1 entries, and should have 2"),
        (spoiled(stages={"update": None}), "report.stages.update: is None, and should be of type dict"),
    ],
    ids=lambda value: value[:30],
)
def test_spoiled_json_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        data.from_json(text)
