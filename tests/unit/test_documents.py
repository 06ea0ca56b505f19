"""Texts of the repository name files and tests that exist, and quote each other word for word."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ("library", "multi_node", "parity", "performance", "plan", "proof", "reliability", "semantics", "train")
TEXTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in GUIDES)]
PATH = re.compile(r"`((?:jaxddp|torch_ref|tests|examples|benchmarks|docs)/[\w./*-]*)`")
TEST = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")


def shown(text: str, command: str) -> str:
    """Block in which a text shows what a command prints."""
    return text.partition(f"```\n$ {command}")[2].partition("```")[0]


def missing(text: str, folder: Path) -> list[str]:
    """Paths in backticks and targets of links that do not exist."""
    named = [name for name in PATH.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    return named + [link for link in LINK.findall(text) if not (folder / link).exists()]


def missing_tests(text: str) -> list[str]:
    """Names of tests in backticks that no file of tests defines."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    return [name for name in TEST.findall(text) if name not in defined]


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_that_a_text_names_exists(name: str) -> None:
    assert missing((ROOT / name).read_text(), (ROOT / name).parent) == []


def test_a_missing_file_is_noticed() -> None:
    assert missing("`jaxddp/nn/` `jaxddp/nn/amp.py` [a](README.md) [b](docs/b.md#c)", ROOT) == [
        "jaxddp/nn/amp.py",
        "docs/b.md",
    ]


def test_every_test_that_a_text_names_exists() -> None:
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    assert TEST.findall(text) and missing_tests(text) == []
    assert missing_tests("`test_a_missing_file_is_noticed` `test_a_file`") == ["test_a_file"]


def test_the_guide_shows_the_check_that_the_readme_shows() -> None:
    command = "python -m jaxddp.parity examples/ports/first_draft.py"
    in_readme = shown((ROOT / "README.md").read_text(), command)
    assert in_readme and in_readme == shown((ROOT / "docs" / "parity.md").read_text(), command)


def test_the_reports_have_the_verdicts_of_the_guide_and_the_stylesheet_of_the_package() -> None:
    folder, guide = ROOT / "docs" / "reports", (ROOT / "docs" / "parity.md").read_text()
    verdicts = dict(re.findall(r"^\| `(\w+)\.py` \| \[(\w+)\]\(reports/\1\.html\) \|$", guide, re.MULTILINE))
    pages = {path.stem: path.read_text() for path in folder.glob("*.html")}
    style = (folder / "style.css").read_text()
    assert style == (ROOT / "jaxddp" / "parity" / "report" / "style.css").read_text()
    assert verdicts.keys() == pages.keys()
    for name, page in pages.items():
        assert f"<title>{verdicts[name]}: examples/ports/{name}.py, " in page, name
        assert '<link rel="stylesheet" href="style.css">' in page and "<style>" not in page, name
        classes = {word for words in re.findall(r' class="([^"]+)"', page) for word in words.split()}
        assert {word for word in classes if f".{word}" not in style} <= {"residuals"}, name


def test_the_site_has_a_page_for_every_package() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    packages = [path.parent for name in ("jaxddp", "torch_ref") for path in (ROOT / name).rglob("__init__.py")]
    names = [".".join(path.relative_to(ROOT).parts) for path in packages]
    assert [name for name in names if f"api/{name}.md\n" not in navigation] == []
