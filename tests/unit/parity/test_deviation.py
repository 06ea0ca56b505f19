"""Words of a cause are made from data, and nothing makes data of them again."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxddp.parity

PARITY = Path(jaxddp.parity.__file__).parent
LAYING_OUT = ("report", "convert")  # folders that lay words out, or have other words: those of names of arrays
WORDS = ("says", "what")
TEXT = {"split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith"}
TEXT |= {"removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "find", "index", "count", "replace"}
PATTERN = {"match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split"}


def parsed_words(tree: ast.AST) -> Iterator[str]:
    """Yield the code that takes words apart."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attr) if attr in TEXT and is_words(value):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in PATTERN and any(map(is_words, args)):
                yield ast.unparse(node)
            case ast.Compare(ops=ops, comparators=right):
                pairs = zip(ops, right, strict=True)
                if any(isinstance(op, ast.In | ast.NotIn) and is_words(one) for op, one in pairs):
                    yield ast.unparse(node)


def is_words(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in WORDS


def test_no_module_parses_the_words_of_a_cause() -> None:
    found = {
        f"{path.relative_to(PARITY)}: {code}"
        for path in PARITY.rglob("*.py")
        if path.relative_to(PARITY).parts[0] not in LAYING_OUT
        for code in parsed_words(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "known.says.startswith('GELU by erf')",
        "hypothesis.says.split('; ')",
        "re.match('labels of (.*)', known.says)",
        "FACTOR.search(says)",
        "', the reference has' in cause.says",
        "self.change.what.endswith(' times')",
        "map(says.partition, HAS)",
    ],
)
def test_code_that_parses_words_is_found(code: str) -> None:
    assert [*parsed_words(ast.parse(f"def f():\n    return {code}\n"))]
    assert not [*parsed_words(ast.parse("x = {change.what}; says = f'{what} instead of {other}'; y = says in known"))]
