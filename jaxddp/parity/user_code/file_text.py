"""A Python file as text and as a syntax tree, edited by replacing the text of single nodes."""

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property

Edit = tuple[ast.AST, str]  # a node, and the text that replaces it
# Within these an operation needs parentheses.
TIGHT = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript, ast.Starred)
FOLLOWED = 3  # definitions are followed from the quoted line this often
OPERATORS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}


class FileText:
    """The text of a Python file, and the places in it that a line depends on.

    Args:
        text: the file's text.

    Raises:
        SyntaxError: the text is not Python.

    >>> source = FileText("SLOPE = 0.2\\ndef f(x):\\n    return leaky_relu(x, SLOPE)\\n")
    >>> [source.segment(statement) for statement in source.near(3)]
    ['return leaky_relu(x, SLOPE)', 'SLOPE = 0.2']
    """

    def __init__(self, text: str):
        self.text, self._bytes = text, text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        begin, end = self._span(node)
        return self._bytes[begin:end].decode()

    def edited(self, *edits: Edit) -> str:
        """Return the text with nodes replaced, which do not overlap; all other bytes stay."""
        result = self._bytes
        for node, text in sorted(edits, key=lambda edit: self._span(edit[0]), reverse=True):
            begin, end = self._span(node)
            code = text.encode()
            if isinstance(self._parents.get(node), TIGHT):
                enclosed = self._bytes[begin - 1 : begin] == b"(" and self._bytes[end : end + 1] == b")"
                begin, end = (begin - 1, end + 1) if enclosed else (begin, end)
                if _is_operation(text) and not _mean_same(*(result[:begin] + x + result[end:] for x in _with(code))):
                    code = b"(" + code + b")"
            result = result[:begin] + code + result[end:]
        return result.decode()

    def filled(self, names: Mapping[str, str]) -> str:
        """Return the text with names replaced by code.

        >>> FileText("sgd(2 * lr)").filled({"lr": "rate + 1"})
        'sgd(2 * (rate + 1))'
        """
        found = [x for x in ast.walk(self.tree) if isinstance(x, ast.Name) and x.id in names]
        return self.edited(*((x, names[x.id]) for x in found))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """All statements of the file, nested ones too, in the order of their lines."""
        return sorted((x for x in ast.walk(self.tree) if isinstance(x, ast.stmt)), key=lambda x: x.lineno)

    def at(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that has a line; None: there is none."""
        spanning = [one for one in self.statements if one.lineno <= line <= (one.end_lineno or one.lineno)]
        return min(spanning, key=lambda one: (one.end_lineno or 0) - one.lineno, default=None)

    def function_at(self, line: int) -> ast.FunctionDef | None:
        """Return the innermost function that has a line; None: there is none."""
        functions = [one for one in self.statements if isinstance(one, ast.FunctionDef)]
        spanning = [one for one in functions if one.lineno <= line <= (one.end_lineno or one.lineno)]
        return max(spanning, key=lambda one: one.lineno, default=None)

    def near(self, line: int) -> list[ast.stmt]:
        """Return the statement at a line, then those that define what it uses, then the others of its function."""
        first = self.at(line)
        if first is None:
            return []
        found, fresh = [first], [first]
        for _ in range(FOLLOWED):
            names = {name for one in fresh for name in _used(one)}
            fresh = [one for one in self.statements if one not in found and names & self._defined(one)]
            inside = [x for one in fresh if isinstance(one, ast.FunctionDef | ast.ClassDef) for x in nested(one)]
            fresh += [one for one in inside if one not in found and one not in fresh]
            found += fresh
        around = self.function_at(line)
        return found + [one for one in (nested(around) if around else []) if one not in found]

    @cached_property
    def constants(self) -> dict[str, float]:
        """Numbers that the file gives names at its top level."""
        found: dict[str, float] = {}
        for statement in self.tree.body:
            for target, value in assigned(statement):
                if isinstance(target, ast.Name) and (number := number_of(value, found)) is not None:
                    found[target.id] = number
        return found

    def _defined(self, statement: ast.stmt) -> set[str]:
        """Return the names that a statement defines, attributes of `self` and arguments with defaults among them."""
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return {statement.name}
        return {last_name(target) for target, _ in assigned(statement)} - {""}


def _is_operation(text: str) -> bool:
    """Return whether code is an operation, which needs parentheses within another one."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return False
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Lambda | ast.Compare | ast.BoolOp) and (
        not isinstance(node, ast.UnaryOp) or not isinstance(node.operand, ast.Constant)
    )


def _with(code: bytes) -> tuple[bytes, bytes]:
    """Return code, and code in parentheses."""
    return code, b"(" + code + b")"


def _mean_same(one: bytes, other: bytes) -> bool:
    """Return whether two texts are the same program."""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False


def gap(left: ast.expr, right: ast.expr) -> ast.stmt:
    """Return a node that covers the text between two expressions."""
    begin = {"lineno": left.end_lineno or 0, "col_offset": left.end_col_offset or 0}
    return ast.Pass(**begin, end_lineno=right.lineno, end_col_offset=right.col_offset)


def assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the (target, value) pairs of an assignment, those of each entry of a tuple by itself."""
    if isinstance(statement, ast.AnnAssign | ast.AugAssign) and statement.value is not None:
        yield statement.target, statement.value
    elif isinstance(statement, ast.Assign):
        value = statement.value
        for target in statement.targets:
            if not isinstance(target, ast.Tuple):
                yield target, value
            elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                yield from zip(target.elts, value.elts, strict=True)
            else:
                yield from ((one, value) for one in target.elts)


def nested(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements within a statement."""
    return [x for x in ast.walk(statement) if isinstance(x, ast.stmt) and x is not statement]


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of statements in it, in the order of the text."""
    waiting, found = [*ast.iter_child_nodes(statement)], list[ast.expr]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.stmt):
            found += [node] if isinstance(node, ast.expr) else []
            waiting += ast.iter_child_nodes(node)
    yield from sorted(found, key=lambda x: (x.lineno, x.col_offset, -(x.end_lineno or 0), -(x.end_col_offset or 0)))


def last_return(function: ast.FunctionDef) -> int:
    """Return the line of a function's last `return`; that of its definition if there is none."""
    return max((x.lineno for x in ast.walk(function) if isinstance(x, ast.Return)), default=function.lineno)


def calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement."""
    yield from (x for x in expressions(statement) if isinstance(x, ast.Call))


def last_name(function: ast.expr) -> str:
    """Return the last part of a dotted name; "" for another expression.

    >>> last_name(ast.parse("jax.nn.gelu", mode="eval").body)
    'gelu'
    """
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def number_of(node: ast.AST, constants: dict[str, float]) -> float | None:
    """Compute an expression of numbers and of constants; None if it is another one.

    >>> number_of(ast.parse("2 * WIDTH ** -0.5", mode="eval").body, {"WIDTH": 16})
    0.5
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number_of(node.operand, constants)
        return None if value is None else -value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = number_of(node.left, constants), number_of(node.right, constants)
        if left is not None and right is not None:
            try:
                value = OPERATORS[type(node.op)](left, right)
            except (ArithmeticError, ValueError):
                return None
            return value if isinstance(value, float) else None
    return None


def _used(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement uses."""
    names = {x.id for x in expressions(statement) if isinstance(x, ast.Name)}
    return names | {x.attr for x in expressions(statement) if isinstance(x, ast.Attribute)}
