"""The schema in docs/ is the one of the classes; reports have its form, and others do not."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxddp.parity.findings import Cause, Findings
from jaxddp.parity.report.json_form import to_json
from jaxddp.parity.report.json_schema import schema
from tests.support.report_cases import EMPTY, EQUAL, HARSH, INCOMPLETE, NOT_FINITE, NUMERIC, SEMANTIC, UNEXPLAINED
from tests.support.schema import check_against, problems

PAGE = Path(__file__).parents[4] / "docs" / "parity.schema.json"


def test_the_schema_in_docs_is_up_to_date() -> None:
    again = "python -m jaxddp.parity.report.json_schema > docs/parity.schema.json"
    assert json.loads(PAGE.read_text()) == schema(), again


def test_every_field_is_described() -> None:
    made = schema()
    assert made["properties"].keys() == {"format", *(field.name for field in fields(Findings))}
    of_cause = {field.name for field in fields(Cause)} | {"names", "says", "fixes"}
    assert made["$defs"]["Cause"]["properties"].keys() == of_cause
    undescribed = [
        name
        for part in (made, *made["$defs"].values())
        for name, of in part["properties"].items()
        if "description" not in of
    ]
    assert set(undescribed) <= {"format"}


def test_reports_have_the_form_of_the_schema_and_others_do_not() -> None:
    made = schema()
    for report in (EQUAL, SEMANTIC, UNEXPLAINED, NUMERIC, INCOMPLETE, NOT_FINITE, HARSH, EMPTY):
        check_against(made, report)
    value = json.loads(to_json(SEMANTIC))
    wrongs: tuple[dict[str, Any], ...] = (
        {"steps": "ten"},
        {"steps": 1.5},
        {"more": 1},
        {"losses": [[1.0]]},
        {"differences": [{}]},
    )
    for wrong in wrongs:
        assert problems(value | wrong, made, made["$defs"], "report"), wrong
    del value["dtype"]
    assert problems(value, made, made["$defs"], "report") == ["report: lacks dtype"]
