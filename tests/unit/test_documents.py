"""Texts of the repository name files and tests that exist, and show what the commands print."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.transcripts import BLOCK, NOT_RUN, Transcript, transcripts

ROOT = Path(__file__).parents[2]
TEXTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PATH = re.compile(r"`((?:jaxddp|torch_ref|tests|examples|benchmarks|docs)/[\w./*-]*)`")
TEST = re.compile(r"`(test_(?!data`)\w+)`")  # `test_data` is a name of programs
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")


def missing(text: str, folder: Path) -> list[str]:
    """Paths in backticks and targets of links that do not exist."""
    named = [name for name in PATH.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    return named + [link for link in LINK.findall(text) if not (folder / link).exists()]


def missing_tests(text: str) -> list[str]:
    """Names of tests in backticks that no file of tests has or defines."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    return [name for name in TEST.findall(text) if name not in defined | {path.stem for path in paths}]


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


@pytest.mark.large
@pytest.mark.parametrize("shown", transcripts(), ids=lambda shown: f"{shown.page.name} {shown.command[:60]}")
def test_a_transcript_is_what_the_command_prints(shown: Transcript) -> None:
    if "jaxddp.plan" in shown.command and not Path(sys.prefix, "cuda-plugin").exists():
        pytest.skip("needs jax's CUDA plugin: make .venv/cuda-plugin")
    if difference := shown.difference(shown.printed()):
        pytest.fail(difference, pytrace=False)


TABLE = """\
stage  worst  step  verdict
samples               0      -        0  equal
update             3e-3     10    1e-12  different            0.weight
optimizer state   1e-16      7    1e-12  equal                exp_avg_sq:2.weight
float32: at most 0.91 times torch's (local gradients)
  proof  it does not act on 0.weight, 2.weight in 1,000 steps and a
         line that is wrapped
20.6 s
"""


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (TABLE.replace("3e-3     10", " 0.2      4").replace("20.6", "1,381"), True),
        (TABLE.replace("1e-16      7", "    0      -").replace("exp_avg_sq:2.weight", ""), True),
        (TABLE.replace("(local gradients)", "(update)").replace("0.91", "1"), True),
        (TABLE.replace("1,000 steps and a\n         line", "3 steps and a line"), True),
        (TABLE.replace("different            0.weight", "different            2.weight"), False),
        (TABLE.replace("0.weight, 2.weight in", "*.weight in"), False),
        (TABLE.replace("    exp_avg_sq:2.weight", "").replace("1e-12  equal", "1e-12  differs too"), False),
        (TABLE.replace("20.6 s\n", ""), False),
        (TABLE + "more\n", False),
    ],
)
def test_transcripts_are_equal_apart_from_numbers_and_what_rounding_picks(now: str, same: bool) -> None:
    assert (Transcript(ROOT, "command", TABLE).difference(now) == "") == same


def test_dots_in_a_transcript_stand_for_lines() -> None:
    dotted = Transcript(ROOT, "command", "first 1\n...\nlast 9\n")
    assert dotted.difference("first 2\nlast 3\n") == dotted.difference("first 2\nb\nc\nlast 3\n") == ""
    assert "+end" in dotted.difference("first 2\nend\n")
    assert dotted.renewed("first 2\nb\nc\nlast 3\n") == "first 2\n...\nlast 3\n"


def test_every_block_with_a_command_is_a_transcript() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    prompts = [line[2:] for page in pages for line in page.read_text().splitlines() if line.startswith("$ ")]
    found = [command for page in pages for command, _ in BLOCK.findall(page.read_text())]
    assert found == prompts and set(found) >= NOT_RUN and len(found) == len(transcripts()) + len(NOT_RUN)


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
