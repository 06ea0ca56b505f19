"""Gallery: its table lists what the page shows, and the report of claims counts."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from examples.claims import Claim, report

ROOT = Path(__file__).parents[2]


WITH_DOCTESTS = [path for path in sorted((ROOT / "examples").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_doctests_of_the_examples(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert not doctest.testmod(importlib.import_module(name)).failed


def test_a_claim_that_does_not_hold_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Claim("this", True), Claim("that", False, 1.0, 2.0)]) == 1
    assert "that" in capsys.readouterr().out


def test_the_table_lists_every_example_of_the_page() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r"^## (.+)\n(?:(?!## ).*\n)*?\$ (.+)$", page, re.MULTILINE)
    listed = re.findall(r"^\| \[.+\]\(#(.+)\) \| `(.+)` \|$", page, re.MULTILINE)
    anchors = [(re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-"), command) for name, command in shown]
    assert shown and listed == anchors
