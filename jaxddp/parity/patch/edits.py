"""Small edits of a file's expressions: another number, option, function or operator, a call left out or put around.

Each function yields edits of one statement as (node, text).
"""

import ast
import itertools
import math
from collections.abc import Collection, Iterator

from jaxddp.parity.operations import readings
from jaxddp.parity.user_code.file_text import Edit, FileText, calls, expressions, gap, last_name, number_of

SAME = 1e-9  # relative difference of a number in the file and one in the report, which has ten digits
# Torch's names of options -> those of jax, flax, optax and jaxddp.
OPTIONS = {
    **{"eps": ("epsilon", "eps"), "p": ("rate",), "dim": ("axis",), "correction": ("ddof", "correction")},
    **{"unbiased": ("ddof",), "bias": ("use_bias",), "mode": ("method", "padding"), "num_groups": ("num_groups",)},
}
# Torch's names of functions -> those of jax, where they differ.
FUNCTIONS = {
    **{"amax": "max", "amin": "min", "cat": "concatenate", "hardsigmoid": "hard_sigmoid", "hardtanh": "hard_tanh"},
    **{"hardswish": "hard_swish", "hardsilu": "hard_silu", "div": "divide", "mul": "multiply", "sub": "subtract"},
    **{"clamp": "clip", "layer_norm": "LayerNorm", "group_norm": "GroupNorm", "batch_norm": "BatchNorm"},
    **{"rms_norm": "RMSNorm", "instance_norm": "InstanceNorm"},
}
PADDINGS = {"'circular'": '"CIRCULAR"', "'constant'": '"SAME"', "'reflect'": '"REFLECT"'}
INVERSE = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
OPERATORS = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}  # torch's names
SWAPPED = {
    **{"mean": "sum", "sum": "mean", "psum": "pmean", "maximum": "minimum", "minimum": "maximum", "max": "min"},
    **{"min": "max", "l2_loss": "squared_error", "eval": "train", "train": "eval"},
}


def jax_name(torch: str) -> str:
    """Return jax's name of a torch function.

    >>> jax_name("avg_pool2d"), jax_name("amax"), jax_name("silu")
    ('avg_pool', 'max', 'silu')
    """
    plain = torch[:-2] if torch[-2:] in ("1d", "2d", "3d") else torch.rstrip("_")
    return FUNCTIONS.get(plain, plain)


def numbers(source: FileText, statement: ast.stmt, port: str, torch: str) -> Iterator[Edit]:
    """Yield the reference's number in place of the port's, also where the file has its inverse, root or square."""
    ours, theirs = number_in(port), number_in(torch)
    if ours is None or theirs is None:
        return
    pairs = zip(readings(ours), readings(theirs), strict=True)
    for position, (old, new) in enumerate(itertools.islice(pairs, 1 if ours in (0, 1) else None)):
        text = torch if not position else _written(new)
        for one in expressions(statement):
            value = number_of(one, source.constants)
            if value is not None and math.isclose(value, old, rel_tol=SAME) and not math.isclose(old, new):
                yield one, text


def scaled(source: FileText, statement: ast.stmt, port: str, torch: str) -> Iterator[Edit]:
    """Yield each number times the reference's over the port's: it may be a factor of the port's."""
    ours, theirs = number_in(port), number_in(torch)
    ratio = theirs / ours if ours and theirs is not None else 0.0
    for one in expressions(statement):
        if isinstance(one, ast.Constant) and (value := number_of(one, {})) and ratio:
            yield one, _written(value * ratio)


def number_in(code: str) -> float | None:
    """Compute the code of a number; None if it is none.

    >>> number_in("1 / 4"), number_in("silu"), number_in("'same'")
    (0.25, None, None)
    """
    try:
        return number_of(ast.parse(code, mode="eval").body, {})
    except SyntaxError:
        return None


def _written(value: float) -> str:
    """Format a number as a programmer would.

    >>> _written(0.30000000000000004), _written(1e-08), _written(8.0)
    ('0.3', '1e-8', '8.0')
    """
    return repr(float(f"{value:.10g}")).replace("e-0", "e-")


def option(source: FileText, statement: ast.stmt, call: str, name: str, value: str) -> Iterator[Edit]:
    """Yield the option of a call replaced or added; a function that is not called here is called by a lambda."""
    for one in calls(statement):
        if last_name(one.func) == call:
            yield one, with_option(source, one, name, value)
    called = [one.func for one in calls(statement)]
    for expression in expressions(statement):
        inner = any(expression is x.value for x in expressions(statement) if isinstance(x, ast.Attribute))
        if last_name(expression) == call and expression not in called and not inner and _is_loaded(expression):
            yield expression, f"lambda x: {source.segment(expression)}(x, {name}={value})"


def with_option(source: FileText, call: ast.Call, name: str, value: str) -> str:
    """Return the text of a call with an option replaced or added."""
    text, start = source.segment(call), call.keywords
    given = next((keyword for keyword in start if keyword.arg == name), None)
    inner = FileText(text)
    parsed = inner.tree.body[0].value  # type: ignore[attr-defined]
    if given is not None:
        return inner.edited((parsed.keywords[start.index(given)].value, value))
    body = text[:-1].rstrip().removesuffix(",")
    return f"{body}{'' if body.endswith('(') else ', '}{name}={value})"


def _is_loaded(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def flags(source: FileText, statement: ast.stmt, names: Collection[str] = ()) -> Iterator[Edit]:
    """Yield each bool of a statement's calls flipped, and each option left out, those with some names only."""
    for call in calls(statement):
        for keyword in call.keywords:
            if names and keyword.arg not in names:
                continue
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool):
                yield keyword.value, str(not keyword.value.value)
            yield call, without_option(source, call, keyword)


def without_option(source: FileText, call: ast.Call, keyword: ast.keyword) -> str:
    """Return the text of a call without an option."""
    kept = [source.segment(x) for x in (*call.args, *call.keywords) if x is not keyword]
    return f"{source.segment(call.func)}({', '.join(kept)})"


def function(source: FileText, statement: ast.stmt, port: str, torch: str) -> Iterator[Edit]:
    """Yield the reference's function in place of the port's."""
    for one in expressions(statement):
        if last_name(one) == port and _is_loaded(one):
            base = source.segment(one).removesuffix(port) if isinstance(one, ast.Attribute) else ""
            yield one, f"{base}{torch}"


def strings(source: FileText, statement: ast.stmt, port: str, torch: str) -> Iterator[Edit]:
    """Yield the reference's text in place of the port's, such as the name of a mode."""
    for one in expressions(statement):
        if (
            isinstance(one, ast.Constant)
            and isinstance(one.value, str)
            and one.value.lower() == port.strip("'").lower()
        ):
            quote = source.segment(one)[-1]
            yield one, f"{quote}{torch.strip(chr(39))}{quote}"


def swapped(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield means in place of sums, the smaller in place of the larger, and so on."""
    for one in expressions(statement):
        if other := SWAPPED.get(last_name(one)):
            yield from function(source, statement, last_name(one), other)


def axes(source: FileText, statement: ast.stmt, call: str = "") -> Iterator[Edit]:
    """Yield other axes of the calls that have one."""
    for one in calls(statement):
        for keyword in one.keywords:
            if keyword.arg in ("axis", "reduction_axes") and call in ("", last_name(one.func)):
                others = [x for x in ("-1", "-2", "0", "1", "2") if x != source.segment(keyword.value)]
                yield from ((keyword.value, other) for other in others)


def left_out(source: FileText, statement: ast.stmt, names: Collection[str] = ()) -> Iterator[Edit]:
    """Yield each call left out, its first argument in its place; those with some names only, if there are any."""
    for one in calls(statement):
        if one.args and (not names or last_name(one.func) in names) and not isinstance(one.args[0], ast.Starred):
            yield one, source.segment(one.args[0])


def wrapped(source: FileText, statement: ast.stmt, around: str) -> Iterator[Edit]:
    """Yield each name, call and operation of a statement as the argument of a function: "stop_gradient({})"."""
    functions = {id(one.func) for one in calls(statement)}
    for one in expressions(statement):
        is_value = isinstance(one, ast.Name | ast.Call | ast.BinOp | ast.Subscript) and id(one) not in functions
        if is_value and (isinstance(one, ast.Call | ast.BinOp) or _is_loaded(one)):
            yield one, around.format(source.segment(one))


def operators(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield an operation with a number left out (x for 2 * x or x // 2 * 2), and inverse operators (+ for -)."""
    yield from factors(source, statement)
    for one in expressions(statement):
        if isinstance(one, ast.BinOp) and type(one.op) in INVERSE:
            yield _with_operator(source, one, INVERSE[type(one.op)])


def operator(source: FileText, statement: ast.stmt, port: str, torch: str) -> Iterator[Edit]:
    """Yield the reference's operator in place of the port's."""
    for one in expressions(statement) if {port, torch} <= OPERATORS.keys() else ():
        if isinstance(one, ast.BinOp) and isinstance(one.op, OPERATORS[port]):
            yield _with_operator(source, one, SYMBOLS[OPERATORS[torch]])


def _with_operator(source: FileText, operation: ast.BinOp, symbol: str) -> Edit:
    between = gap(operation.left, operation.right)
    return between, source.segment(between).replace(SYMBOLS[type(operation.op)], symbol)


def factors(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield the only operand of an operation that is not a number, and either of two such operands."""
    for one in expressions(statement):
        if isinstance(one, ast.BinOp):
            parts = [x for x in ast.walk(one) if isinstance(x, ast.expr) and not isinstance(x, ast.BinOp)]
            operands = [x for x in parts if number_of(x, source.constants) is None and _is_operand(one, x)]
            if len(operands) == 1:
                yield one, source.segment(operands[0])
            elif not operands:
                yield from ((one, source.segment(x)) for x in (one.left, one.right))


def parts(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield one operand, or one case of a condition, in place of the whole."""
    for one in expressions(statement):
        if isinstance(one, ast.BinOp | ast.IfExp):
            both = (one.left, one.right) if isinstance(one, ast.BinOp) else (one.body, one.orelse)
            yield from ((one, source.segment(x)) for x in both)


def without_constant(source: FileText, statement: ast.stmt) -> Iterator[list[Edit]]:
    """Yield all operations with one constant left out at once: x / y for x // n * n / y."""
    of_constant: dict[str, list[Edit]] = {}
    for one in expressions(statement):
        if isinstance(one, ast.BinOp) and number_of(one.right, source.constants) is not None:
            edit: Edit = one, source.segment(one.left)
            if isinstance(one.left, ast.BinOp):  # it may be edited too
                after = gap(one.left, one.right)
                after.col_offset += source.segment(after).rfind(")") + 1
                after.end_lineno, after.end_col_offset = one.right.end_lineno, one.right.end_col_offset
                edit = after, ""
            of_constant.setdefault(source.segment(one.right), []).append(edit)
    yield from (edits for edits in of_constant.values() if len(edits) > 1)


def _is_operand(operation: ast.BinOp, node: ast.expr) -> bool:
    """Return whether a node is an operand of a tree of operations, and no part of one."""
    if node in (operation.left, operation.right):
        return True
    inner = [x for x in (operation.left, operation.right) if isinstance(x, ast.BinOp)]
    return any(_is_operand(x, node) for x in inner)


def entries(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield a value of a dictionary in the place of each other one."""
    for one in expressions(statement):
        if isinstance(one, ast.Dict) and len(one.values) > 1:
            pairs = itertools.permutations(one.values, 2)
            yield from ((place, source.segment(value)) for place, value in pairs)


def orders(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield the elements of a list or tuple, up to four, and the names that a statement unpacks, in other orders."""
    for one in expressions(statement):
        if isinstance(one, ast.List | ast.Tuple) and 2 <= len(one.elts) <= 4:
            parts = [source.segment(x) for x in one.elts]
            ends = source.segment(one)[0], source.segment(one)[-1]
            begin, end = ends if ends in (("(", ")"), ("[", "]")) else ("", "")
            for order in itertools.islice(itertools.permutations(parts), 1, None):
                yield one, f"{begin}{', '.join(order)}{end}"
