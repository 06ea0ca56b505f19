"""The worst habits of the project's English do not come back: patterns that no document, docstring or message has."""

import ast
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Generated: what commands print, and sentences of reports that were recorded.
GENERATED = {"cli.md", "scoreboard.md", "threads.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
]
# Pattern -> what to write instead.
HABITS = {
    r"\bof (yours\b|(its|your|their) own\b(?!\s+\w))": "your ..., its ...",
    r"\b(is|are|was|were) told\b": "is reported",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"\bnobody\b": "the passive, or no one",
    r"\b(go|goes|going|went) on\b": "continue",
    r"\bbehind (the|a|an|each|its)\b": "after",
    r"\bas (torch|jax|jaxddp|DDP|it|they|we|users?) (does|do|did)\b": "like torch",
    r"^Of (a|an|the|all|\d)": "the subject first",
    r"\bflax_(model|loss|step|optimizer|batch)\b": "jax_model, ...",
    r"\b(run|port) files?\b": "program",
    r"python -m jaxddp\.(plan|parity\.convert|parity compare)": "jaxddp plan, ...",
}


def prose(text: str) -> str:
    """Return a page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def texts(path: Path) -> list[str]:
    """Return the texts in the code of a module: docstrings, messages, help, sentences of reports."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return [inspect.cleandoc(text) for text in strings if isinstance(text, str) and " " in text.strip()]


def habits(text: str) -> list[str]:
    """Return the phrases of a text that should be written otherwise."""
    return [
        f"{found[0].strip()!r}: write {instead}"
        for pattern, instead in HABITS.items()
        for found in re.finditer(pattern, text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_idiomatic_english(page: Path) -> None:
    assert habits(prose(page.read_text())) == []


@pytest.mark.parametrize("package", ["jaxddp", "torch_ref"])
def test_docstrings_and_messages_are_in_idiomatic_english(package: str) -> None:
    found = {path: habits(prose("\n".join(texts(path)))) for path in sorted((ROOT / package).rglob("*.py"))}
    assert {path.relative_to(ROOT).as_posix(): phrases for path, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The run goes on as torch does, and a failure is told.", 3),
        ("Of 600 ports, a run file of yours is written anew; it has a name of its own.", 5),
        ("The run continues like torch's. `goes on` is code.", 0),
    ],
)
def test_a_habit_is_noticed(text: str, count: int) -> None:
    assert len(habits(prose(text))) == count
