"""The page of the examples, and the lines in which they say what holds."""

import doctest
from pathlib import Path
from types import ModuleType

import pytest

from examples import arrays, claims, entry, gallery
from examples.claims import Claim, report
from examples.entry import Example

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"


@pytest.mark.parametrize("module", [arrays, claims, entry])
def test_what_all_examples_use_is_as_documented(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_a_claim_that_does_not_hold_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Claim("this", True), Claim("that", False, 1.0, 2.0)]) == 1
    assert "that" in capsys.readouterr().out


@pytest.mark.parametrize("example", gallery.examples(), ids=lambda example: example.name)
def test_the_page_and_the_readme_have_it(example: Example) -> None:
    page, readme = PAGE.read_text(), (ROOT / "README.md").read_text()
    assert example.claim in page and f"**{example.verdict}**" in page and f"$ {example.command}\n" in page
    assert example.picture is None or (PAGE.parent / example.picture).is_file()
    assert f"{example.row}\n" in readme
