"""Differences for which no patch is sought say why."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Cause, Difference
from jaxddp.parity.patch import proposals
from jaxddp.parity.patch.edited_files import EditedFiles
from jaxddp.parity.patch.proposals import Proposals
from jaxddp.parity.quote import Quote

CAUSE = Cause((Deviation("number", Statement("factor", of="x", call="mul", value=1.0, reference=2.0)),), 0.0)


def reason(folder: Path, has: bool = True, quote: Quote | None = None, **changed: Any) -> str:
    trials: Any = SimpleNamespace(before={}, has=lambda difference: has)
    workers: Any = None
    files = EditedFiles(folder / "port.py")
    made = Proposals(files, trials, InterruptibleSearches(workers, []), lambda runs: False)
    cause = replace(CAUSE, jax=quote)
    (found,) = made.of([Difference("update", 1, "w", 0.1, 1e-12, cause=cause, **changed)])
    assert found.patch is not None and found.patch.verdict == "none" and not files.whole
    return found.patch.why_not


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "numeric"}, proposals.ROUNDING),
        ({"not_finite": "jax"}, proposals.NOT_FINITE),
        ({"has": False}, proposals.NOT_FORCED),
        ({}, proposals.NO_LINE),
        ({"quote": Quote("/elsewhere/model.py", 3)}, proposals.NOT_BESIDE.format("model.py")),
    ],
)
def test_a_difference_without_a_patch_says_why(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert reason(tmp_path, **settings) == why


def test_a_file_that_cannot_be_read_or_is_not_python_has_no_edits(tmp_path: Path) -> None:
    assert reason(tmp_path, quote=Quote(str(tmp_path / "gone.py"), 1)) == proposals.ADVICE
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    assert reason(tmp_path, quote=Quote(str(broken), 1)) == proposals.ADVICE
