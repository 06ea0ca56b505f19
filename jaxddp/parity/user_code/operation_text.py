"""Quote an operation of a user's line as code, with its longer operands left out."""

import ast
import linecache
from collections.abc import Iterator, Sequence

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.file_text import FileText, last_name, number_of

LONGEST = 60  # characters of a quoted line
BINARY = {"mul": ast.Mult, "div": ast.Div, "add": ast.Add, "sub": ast.Sub}
# Names under which a program may call a function.
NAMES = {
    **dict.fromkeys(("clip", "clamp"), ("clip", "clamp")),
    **{"max": ("maximum", "max"), "min": ("minimum", "min"), "select_n": ("select_n", "where")},
}


def operation_text(line: SourceLine, function: str, numbers: Sequence[float] = ()) -> str:
    """Return an operation as code.

    Args:
        line: the line.
        function: name of the operation's function; "add", "sub", "mul" and "div" are operators too.
        numbers: numbers that the operation is given.
    """
    linecache.checkcache(line.path)
    node = next(_nodes(line, function, numbers), None)
    return line.text[:LONGEST] if node is None else in_short(node)


def numbers_of_call(line: SourceLine, function: str) -> list[float]:
    """Return the numbers that the call of a function at a line is given, by names of the file's constants too."""
    node, text = next(_nodes(line, function), None), _text_of(line)
    arguments = [*node.args, *(x.value for x in node.keywords)] if isinstance(node, ast.Call) else []
    numbers = (number_of(x, text.constants if text else {}) for x in arguments)
    return [x for x in numbers if x is not None]


def in_short(node: ast.expr) -> str:
    """Return a call or an operation as code, with "..." for operands that are neither names nor numbers.

    >>> in_short(ast.parse("jnp.clip(model(batch['x']), -3, 3)", mode="eval").body)
    'jnp.clip(..., -3, 3)'
    >>> in_short(ast.parse("f(x).clip(max=1.0)", mode="eval").body), in_short(ast.parse("f(x) * 1.0", mode="eval").body)
    ('(...).clip(max=1.0)', '... * 1.0')
    """
    if isinstance(node, ast.BinOp):
        pair = ast.BinOp(_operand(node.left), node.op, _operand(node.right))
        return ast.unparse(pair)
    if not isinstance(node, ast.Call):
        return ast.unparse(node)
    function = node.func
    if isinstance(function, ast.Attribute) and not _is_name(function):
        name = f"(...).{function.attr}"
    else:
        name = ast.unparse(function)
    arguments = [ast.unparse(_operand(x)) for x in node.args]
    arguments += [f"{x.arg}={ast.unparse(_operand(x.value))}" for x in node.keywords if x.arg]
    return f"{name}({', '.join(arguments)})"


def _operand(node: ast.expr) -> ast.expr:
    return node if _is_name(node) or number_of(node, {}) is not None else ast.Constant(...)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def _text_of(line: SourceLine) -> FileText | None:
    try:
        return FileText("".join(linecache.getlines(line.path)))
    except SyntaxError:
        return None


def _nodes(line: SourceLine, function: str, numbers: Sequence[float] = ()) -> Iterator[ast.expr]:
    """Yield the expressions at a line that may be an operation, the likeliest first."""
    text = _text_of(line)
    nodes = [x for x in ast.walk(text.tree) if isinstance(x, ast.expr)] if text else []
    spanning = [x for x in nodes if x.lineno <= line.number <= (x.end_lineno or x.lineno)]
    spanning.sort(key=lambda x: (abs(x.lineno - line.number), (x.end_lineno or 0) - x.lineno))
    names = NAMES.get(function, (function,))
    calls = (x for x in spanning if isinstance(x, ast.Call))
    yield from (x for x in calls if _called(x, names) or (function == "dropout" and "drop" in _name_in(x)))
    kind = BINARY.get(function)
    operations = [x for x in spanning if kind is not None and isinstance(x, ast.BinOp) and isinstance(x.op, kind)]
    yield from sorted(operations, key=lambda x: not any(number_of(y, {}) in numbers for y in (x.left, x.right)))


def _called(call: ast.Call, names: tuple[str, ...]) -> bool:
    return last_name(call.func).strip("_") in names or last_name(call.func) in names


def _name_in(call: ast.Call) -> str:
    return ast.unparse(call.func).lower()
