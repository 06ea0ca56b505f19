"""Operators on values: numbers, arithmetic, comparisons, booleans, branches, axes, slices and strings."""

import ast
from collections.abc import Iterator

from .siblings import STRINGS
from .source import Source

AXIS_KEYWORDS = frozenset({"axis", "axes", "dim", "dims", "in_axes", "out_axes"})
# Functions whose arguments, after an array, are axes.
AXIS_CALLS = frozenset(
    {"mean", "sum", "max", "min", "std", "var", "prod", "cumsum", "softmax", "log_softmax", "squeeze", "unsqueeze"}
    | {"swapaxes", "transpose", "moveaxis", "flatten", "argmax", "all", "any", "vmap"}
)
ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-", "*")),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/", "+")),
    ast.Div: ("/", ("*", "-")),
    ast.Pow: ("**", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.MatMult: ("@", ("*",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=", ">="),
    ast.NotEq: ("==",),
}
SELECTING = frozenset({"where", "cond", "select"})  # functions of a condition and two branches
COUNTING = frozenset({"range", "arange"})
SEEDED = frozenset({"key", "PRNGKey", "Rngs", "manual_seed", "default_rng"})  # another seed is the same program


def numbers(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace a number by near ones, by 0, by its double and by its negative."""
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return
    if _is_axis(node, source) or any(map(_is_kept, source.ancestors(node))):
        return
    x = node.value
    near = (2 * x, 1.1 * x, 0.0, -x, 1.0) if isinstance(x, float) else (x + 1, x - 1, 2 * x, 0, -x)
    for value in dict.fromkeys(value for value in near if value != x):
        yield *source.span(node), _literal(value)


def _is_kept(node: ast.AST) -> bool:
    """Return whether the numbers below a node are bounds, which `slices` moves, or seeds."""
    return isinstance(node, ast.Slice) or (isinstance(node, ast.Call) and _called(node) in SEEDED)


def _literal(value: float) -> str:
    """Return the code of a number, in parentheses if it is negative."""
    code = str(value) if isinstance(value, int) else f"{value:.6g}"
    code = code if isinstance(value, int) or {".", "e"} & {*code} else f"{code}.0"
    return f"({code})" if value < 0 else code


def arithmetic(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace an operator, swap its operands or leave one out; leave out a sign."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        symbol, siblings = ARITHMETIC[type(node.op)]
        left, right = source.operand(node.left), source.operand(node.right)
        pairs = [f"({left} {sibling} {right})" for sibling in siblings]
        swapped = [] if symbol in "+*&|" else [f"({right} {symbol} {left})"]
        yield from ((*source.span(node), code) for code in (*pairs, *swapped, left, right))
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        target, value = source.code(node.target), source.code(node.value)
        for sibling in ("", *ARITHMETIC[type(node.op)][1]):
            yield *source.span(node), f"{target} {sibling}= {value}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert) and not _is_axis(node, source):
        yield *source.span(node), source.operand(node.operand)


def comparisons(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace a comparison, or exchange `and` and `or`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = source.operand(node.left), source.operand(node.comparators[0])
        for sibling in COMPARISONS.get(type(node.ops[0]), ()):
            yield *source.span(node), f"({left} {sibling} {right})"
    elif isinstance(node, ast.BoolOp):
        joint = " or " if isinstance(node.op, ast.And) else " and "
        yield *source.span(node), f"({joint.join(map(source.operand, node.values))})"


def booleans(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Exchange True and False."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield *source.span(node), str(not node.value)


def branches(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Exchange two branches, take always the same one, or negate a condition."""
    if isinstance(node, ast.IfExp):
        body, test, orelse = map(source.operand, (node.body, node.test, node.orelse))
        for code in (f"({orelse} if {test} else {body})", body, orelse):
            yield *source.span(node), code
    elif isinstance(node, ast.If | ast.While):
        yield *source.span(node.test), f"not {source.operand(node.test)}"
    elif isinstance(node, ast.Call) and _called(node) in SELECTING and len(node.args) == 3:
        test, body, orelse = map(source.code, node.args)
        yield *source.span(node), f"{source.code(node.func)}({test}, {orelse}, {body})"
        for branch in node.args[1:]:
            yield *source.span(node), source.operand(branch)


def axes(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace an axis by others; leave out one of several, or exchange two."""
    if isinstance(node, ast.Tuple) and _names_axes(node, source) and len(node.elts) > 1:
        first, second, *rest = map(source.code, node.elts)
        yield *source.span(node), f"({', '.join([second, first, *rest])})"
        yield *source.span(node), f"({', '.join([second, *rest])},)"
    elif (axis := _integer(node)) is not None and _is_axis(node, source):
        for sibling in [sibling for sibling in (0, 1, -1, -2) if sibling != axis][:3]:
            yield *source.span(node), str(sibling)


def _integer(node: ast.AST) -> int | None:
    """Return the integer that a node states, perhaps with a sign."""
    sign = -1 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1
    constant = node.operand if isinstance(node, ast.UnaryOp) and sign == -1 else node
    return sign * constant.value if isinstance(constant, ast.Constant) and type(constant.value) is int else None


def _is_axis(node: ast.AST, source: Source) -> bool:
    """Return whether a number, or the number under a sign, is an axis."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.UnaryOp) and isinstance(node, ast.Constant):
        return _is_axis(parent, source)
    return _names_axes(parent if isinstance(parent, ast.Tuple) else node, source)


def _names_axes(node: ast.AST, source: Source) -> bool:
    """Return whether an argument is an axis, or a tuple of axes."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.keyword):
        return parent.arg in AXIS_KEYWORDS
    return isinstance(parent, ast.Call) and node is not parent.func and _called(parent) in AXIS_CALLS


def _called(node: ast.Call) -> str:
    """Return the last name of a called function."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def slices(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Move a bound of a slice, an index or the length of a range by one; leave out a bound."""
    if isinstance(node, ast.Slice):
        for bound in filter(None, (node.lower, node.upper, node.step)):
            number = _integer(bound)
            near = [f"{source.code(bound)} + 1"] if number is None else [str(number + 1), str(number - 1)]
            for code in (*near, ""):
                yield *source.span(bound), code
    elif isinstance(node, ast.Subscript):
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for element in elements:
            if (number := _integer(element)) is not None:
                yield *source.span(element), str(number + 1)
                yield *source.span(element), str(number - 1)
    elif isinstance(node, ast.Call) and _called(node) in COUNTING:
        for argument in node.args:
            if not isinstance(argument, ast.Constant):
                yield *source.span(argument), f"{source.operand(argument)} + 1"
                yield *source.span(argument), f"{source.operand(argument)} - 1"


def strings(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace an option, or the key of a batch or a tree by its next one; exchange two axes of an einsum."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        for sibling in STRINGS.get(node.value, ()):
            yield *source.span(node), f'"{sibling}"'
        inputs, arrow, output = node.value.partition("->")
        if arrow and len(output) > 1:
            yield *source.span(node), f'"{inputs}->{output[:-2]}{output[-1]}{output[-2]}"'
    elif isinstance(node, ast.Subscript) and (key := _key(node)) is not None:
        keys = _keys(source.code(node.value), source)
        if len(keys) > 1:
            yield *source.span(node.slice), f'"{keys[(keys.index(key) + 1) % len(keys)]}"'


def _key(node: ast.AST) -> str | None:
    """Return the string by which an object is subscripted."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return None


def _keys(code: str, source: Source) -> list[str]:
    """Return all strings by which an object is subscripted in a file, in their order."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Subscript)]
    nodes.sort(key=source.span)
    return list(dict.fromkeys(key for node in nodes if source.code(node.value) == code and (key := _key(node))))
