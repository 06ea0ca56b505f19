"""Gallery: its page, the README's table, and the report of claims."""

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
def test_doctests_of_the_shared_modules(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_a_claim_that_does_not_hold_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Claim("this", True), Claim("that", False, 1.0, 2.0)]) == 1
    assert "that" in capsys.readouterr().out


@pytest.mark.parametrize("example", gallery.examples(), ids=lambda example: example.name)
def test_the_page_and_the_readme_show_the_example(example: Example) -> None:
    page, readme = PAGE.read_text(), (ROOT / "README.md").read_text()
    assert example.claim in page and f"**{example.verdict}**" in page and f"$ {example.command}\n" in page
    assert example.picture is None or (PAGE.parent / example.picture).is_file()
    assert f"{example.row}\n" in readme
