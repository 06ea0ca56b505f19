"""The statement `names = {...}` of a port file, as text."""

import ast
from collections.abc import Mapping

NAME = "names"


def names_block(names: Mapping[str, str]) -> str:
    """Return the statement, a line for each entry.

    >>> print(names_block({"Dense_0": "fc1"}))
    names = {
        "Dense_0": "fc1",
    }
    """
    lines = (f"    {_quoted(flax)}: {_quoted(torch)},\n" for flax, torch in names.items())
    return f"{NAME} = {{\n{''.join(lines)}}}"


def with_names(text: str, names: Mapping[str, str]) -> str:
    r"""Return a port file's text with this table in place of its own, or at its end.

    >>> print(with_names("x = 1\nnames = {}  # none\ny = 2\n", {"a": "b"}))
    x = 1
    names = {
        "a": "b",
    }
    y = 2
    <BLANKLINE>
    """
    lines = text.splitlines(keepends=True)
    block = f"{names_block(names)}\n"
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == NAME for target in targets):
            return "".join([*lines[: node.lineno - 1], block, *lines[node.end_lineno :]])
    return f"{text.rstrip()}\n\n{block}"


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
