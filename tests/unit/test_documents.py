"""Texts of the repository name files and tests that exist, and show what the commands print."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import jaxddp
import jaxddp.data
import jaxddp.parity
from jaxddp.config.checks import flag
from jaxddp.config.hints import OTHER_TRAINERS, VALUES
from jaxddp.parity import Port
from jaxddp.parity.catalogue import FAULTS
from jaxddp.program.calls import BY_NAME
from jaxddp.program.program import NAMES, OPTIONS
from jaxddp.step.options import StepKeywords
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


def test_every_test_of_the_rotation_exists() -> None:
    listed = [name.split("::") for name in (ROOT / "tests" / "rotation.txt").read_text().split()]
    assert listed == sorted(listed)
    for path, name in listed:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}: run python -m tests.support.rotation"


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


def test_the_reference_has_every_name_of_a_program() -> None:
    reference = (ROOT / "docs" / "program.md").read_text()
    names = {*NAMES, OPTIONS, *BY_NAME} | {f.name for f in dataclasses.fields(Port)} - {"unchecked"}
    assert [name for name in sorted(names - {"world_size"}) if f"`{name}`" not in reference] == []


def pairs_in(section: str) -> list[tuple[str, str]]:
    """Each name in backticks in the first cells of a section's tables, with the text of the last cell of its row."""
    rows = [line.strip("| ").rpartition(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(name, ours.replace("`", "")) for theirs, _, ours in rows for name in re.findall("`([^`]+)`", theirs)]


def test_the_guide_lists_the_flags_and_values_of_other_trainers_that_errors_translate() -> None:
    guide = (ROOT / "docs" / "train.md").read_text()
    section = guide.partition("### Flags of other trainers\n")[2].partition("\n## ")[0]
    values = [(given, f"{flag(option)} {meant}") for option, kind in VALUES.items() for given, meant in kind.items()]
    assert sorted(pairs_in(section)) == sorted([*OTHER_TRAINERS.items(), *values])


def test_a_row_of_several_names_is_a_pair_for_each_of_them() -> None:
    assert pairs_in("| A | B | ours |\n|---|---|---|\n| `--a`, `--b` | | `--c`, all |\n") == [
        ("--a", "--c, all"),
        ("--b", "--c, all"),
    ]


def test_the_site_has_a_page_for_every_package() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    packages = [path.parent for name in ("jaxddp", "torch_ref") for path in (ROOT / name).rglob("__init__.py")]
    names = [".".join(path.relative_to(ROOT).parts) for path in packages]
    assert [name for name in names if f"api/{name}.md\n" not in navigation] == []


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    options = set(StepKeywords.__annotations__)
    assert {*jaxddp.__all__, *jaxddp.data.__all__, *jaxddp.parity.__all__, *options} <= words


def test_the_readme_has_the_numbers_of_the_scoreboard() -> None:
    readme, board, threads = (
        (ROOT / name).read_text() for name in ("README.md", "docs/scoreboard.md", "docs/threads.md")
    )
    found, named = re.findall(r"faults planted \| 600 \| (\d+) found, (\d+) named, 0 named wrongly", board)[0]
    assert f"| 600 | {named} | 0 |" in readme and found == "600"
    header = next(line for line in board.splitlines() if line.startswith("| fault | ports |"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    rows = [line.strip("|").split("|") for line in board.partition(header)[2].partition("\n\n")[0].splitlines()[2:]]
    alarms = {
        name: sum(int(row[columns.index(name)]) for row in rows if row[0].strip() in FAULTS) for name in columns[-4:]
    }
    assert f"forward pass compared to 1e-5 | {alarms['forward pass to 1e-5']} |" in readme
    assert f"`allclose` on the updated parameters | {alarms['allclose on the parameters']} |" in readme
    same, none = (int(re.search(pattern, board)[1]) for pattern in (r"the same cause (\d+)", r"another 0, none (\d+)"))  # type: ignore[index]
    assert f"| {same + none} public issues" in readme.replace("| - |", "|") or f"{same + none} public issues" in readme
    assert f"| - | {same} | 0 |" in readme and "74 threads" in threads
    assert board.count("| 0 false alarms |") == 1 and "| 0 different, 0 beyond, 0 incomplete," in board
