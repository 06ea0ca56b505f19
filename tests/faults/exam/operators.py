"""Operators of the exam: each edits one place of a Python file, as a slip of the pen would.

An operator is a function of a node and its source that yields replacements, (start, end, text); the rest of the file
stays as it is, byte for byte.
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from . import calls, names, values
from .source import Source

Replacement = tuple[int, int, str]
Operator = Callable[[ast.AST, Source, str], Iterator[Replacement]]

NO_TEXT = str.maketrans("", "", "()")

OPERATORS: dict[str, Operator] = {
    "number": values.numbers,
    "arithmetic": values.arithmetic,
    "comparison": values.comparisons,
    "boolean": values.booleans,
    "branch": values.branches,
    "axis": values.axes,
    "slice": values.slices,
    "string": values.strings,
    "keyword_left_out": calls.keywords_left_out,
    "keyword_added": calls.keywords_added,
    "keyword_value": calls.keyword_values,
    "arguments_swapped": calls.arguments_swapped,
    "call_left_out": calls.calls_left_out,
    "function_sibling": calls.function_siblings,
    "statement_left_out": names.statements_left_out,
    "name": names.other_names,
    "returned": names.other_results,
    "decorator": names.decorators_left_out,
}


@dataclass(frozen=True)
class Edit:
    """An edit of one place of a file.

    Attributes:
        operator: name of the operator.
        line, column: position of the place, from 1.
        variant: number among the edits of this operator at this place, from 0.
        start, end: where the replaced text starts and ends in the file.
        before, after: the text that is replaced, and the text that replaces it.
    """

    operator: str
    line: int
    column: int
    variant: int
    start: int
    end: int
    before: str
    after: str

    @property
    def is_none(self) -> bool:
        """Return whether the edit adds or takes away parentheses and spaces at most.

        >>> Edit("name", 1, 5, 0, 4, 5, "x", "(x)").is_none
        True
        """
        before, after = ("".join(code.translate(NO_TEXT).split()) for code in (self.before, self.after))
        return before == after

    def apply(self, text: str) -> str:
        """Return the text of the file after the edit.

        >>> Edit("number", 1, 5, 0, 4, 5, "1", "2").apply("x = 1\\n")
        'x = 2\\n'
        """
        return text[: self.start] + self.after + text[self.end :]


def edits(source: Source, statements: Collection[ast.stmt], half: str) -> list[Edit]:
    """Return all edits of some statements of a file.

    Args:
        source: the file.
        statements: statements at the file's top level; nothing else is edited.
        half: "jax" or "torch", which has other functions.

    >>> source = Source("y = a < 0.5")
    >>> [(edit.operator, edit.before, edit.after) for edit in edits(source, source.tree.body, "jax")][:2]
    [('comparison', 'a < 0.5', '(a <= 0.5)'), ('comparison', 'a < 0.5', '(a > 0.5)')]
    """
    listed: list[Edit] = []
    variants: Counter[tuple[str, int, int]] = Counter()
    for node in source.nodes(statements):
        for name, operator in OPERATORS.items():
            for start, end, after in operator(node, source, half):
                line, column = source.position(start)
                variant, before = variants[name, line, column], source.text[start:end]
                variants[name, line, column] += 1
                listed.append(Edit(name, line, column, variant, start, end, before, after))
    return listed


def is_a_program(text: str) -> bool:
    """Return whether a text compiles.

    >>> is_a_program("x = 1"), is_a_program("x =")
    (True, False)
    """
    try:
        compile(text, "edited", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
