"""Python source with positions: the code of each node, and the statements that one half of a port reaches."""

import ast
from collections.abc import Collection, Iterator
from functools import cached_property

ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict)
UNCHANGED = (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.JoinedStr)  # nodes in which nothing is edited
ANNOTATIONS = ("annotation", "returns", "type_comment")


class Source:
    """Text of a Python file, its syntax tree, and where each node stands in the text.

    Args:
        text: the file's text.

    Example:
        >>> source = Source("y = a * (b + c)")
        >>> product = source.tree.body[0].value
        >>> source.code(product), source.operand(product.right)
        ('a * (b + c)', '(b + c)')
    """

    def __init__(self, text: str):
        self.text, self.tree = text, ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the parent of each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where the code of a node starts and ends in the text."""
        start = self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """Return the offset of a position of `ast`, whose columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def position(self, offset: int) -> tuple[int, int]:
        """Return the line and the column of an offset in the text, both from 1.

        >>> Source("x = 1\\ny = 2").position(6)
        (2, 1)
        """
        line = self.text.count("\n", 0, offset)
        return line + 1, offset - self._starts[line] + 1

    def code(self, node: ast.AST) -> str:
        """Return the code of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def operand(self, node: ast.AST) -> str:
        """Return the code of an expression, in parentheses unless it binds as tightly as a name."""
        code = self.code(node)
        return code if isinstance(node, ATOMS) else f"({code})"

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of a node, its parent, and so on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the innermost function around a node."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.FunctionDef)), None)

    def nodes(self, statements: Collection[ast.stmt]) -> Iterator[ast.AST]:
        """Yield the nodes of some statements that may be edited, in the order of the text."""
        for statement in self.tree.body:
            if statement in statements:
                yield from _editable(statement)

    def reached(self, roots: Collection[str]) -> set[ast.stmt]:
        """Return the statements of the file that define some names, and those that define what these use.

        >>> source = Source("a = 1\\nb = a\\nc = 2\\n")
        >>> sorted(source.code(statement) for statement in source.reached({"b"}))
        ['a = 1', 'b = a']
        """
        statements: set[ast.stmt] = set()
        names, known = list(roots), set(roots)
        while names:
            for statement in self._definitions.get(names.pop(), ()):
                statements.add(statement)
                used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - known
                known |= used
                names += used
        return statements

    @cached_property
    def _definitions(self) -> dict[str, list[ast.stmt]]:
        definitions: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            for name in defined_names(statement):
                definitions.setdefault(name, []).append(statement)
        return definitions


def defined_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a file defines or changes.

    >>> defined_names(ast.parse("def f(): c = 3").body[0])
    {'f'}
    """
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = {
        ast.Assign: lambda: statement.targets,  # type: ignore[attr-defined]
        ast.AnnAssign: lambda: [statement.target],  # type: ignore[attr-defined]
        ast.AugAssign: lambda: [statement.target],  # type: ignore[attr-defined]
    }.get(type(statement), list)()
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _editable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without docstrings, annotations and statements that stay as they are."""
    if isinstance(node, UNCHANGED) or _is_text(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if name not in ANNOTATIONS:
            for child in children:
                if isinstance(child, ast.AST):
                    yield from _editable(child)


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is a docstring, or another text that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
