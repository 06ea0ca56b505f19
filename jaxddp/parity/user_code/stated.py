"""Find the line that states a value that another line uses: a constant's, or the one that makes a layer."""

import ast
import itertools
import linecache
import math
from collections.abc import Collection, Iterator, Sequence

from jaxddp.parity.deviation import Deviation
from jaxddp.parity.operations import Lines, SourceLine
from jaxddp.parity.user_code.file_text import FileText, assigned, expressions, last_name, last_return, nested, number_of

OF_GROUPS = "rate_of_some"  # fault of the rates of a group
MASK, DECAY = "decay_mask", "weight_decay"  # fault of a mask, and what it masks
FOLLOWED = 3  # definitions are followed from the quoted line this often


def where_stated(lines: Lines, deviation: Deviation) -> Lines:
    """Return the lines of both sides that state the values in a cause.

    A line that states its value itself, or whose value is not found, stays as it is.

    Args:
        lines: lines at which the values are used.
        deviation: what the port does with them.
    """
    layer, jax = deviation.where.rpartition(".")[2], lines.jax
    for value in deviation.values:
        torch = lines.torch if value.is_factor else stated_at(lines.torch, value.torch, layer)  # that is 1
        lines = Lines(stated_at(lines.jax, value.jax, layer), torch)
    if deviation.kind == OF_GROUPS:
        each = dict(deviation.what.parts).get("each", ())
        names = each[0][0] if len(each) == 1 else ()
        return Lines(
            _entry_at(lines.jax, names) or lines.jax,
            _entry_at(lines.torch, names) or _keyed_at(lines.torch, "lr") or lines.torch,
        )
    of_mask = deviation.kind == MASK or any(value.key == DECAY for value in deviation.values)
    return Lines(_masked_at(lines.jax) or lines.jax, lines.torch) if of_mask and lines.jax == jax else lines


def _keyed_at(line: SourceLine | None, key: str) -> SourceLine | None:
    """Return the only line of a line's function that gives a dictionary a key; None: none does, or several do."""
    text = text_of(line)
    function = None if text is None or line is None else text.function_at(line.number)
    if line is None or function is None:
        return None
    keys = (x for node in ast.walk(function) if isinstance(node, ast.Dict) for x in node.keys)
    found = {x.lineno for x in keys if isinstance(x, ast.Constant) and x.value == key}
    return SourceLine(line.path, found.pop()) if len(found) == 1 else None


def _entry_at(line: SourceLine | None, names: Sequence[str]) -> SourceLine | None:
    """Return the only line of a line's function with a key of a dictionary that is a module of all of some tensors.

    None: there is none, or several are.
    """
    text = text_of(line)
    function = None if text is None or line is None else text.function_at(line.number)
    if line is None or function is None or not names:
        return None
    keys = (x for node in ast.walk(function) if isinstance(node, ast.Dict) for x in node.keys)
    modules = ((x.value, x.lineno) for x in keys if isinstance(x, ast.Constant) and isinstance(x.value, str))
    numbers = {number for module, number in modules if all(f"{name}.".startswith(f"{module}.") for name in names)}
    return SourceLine(line.path, numbers.pop()) if len(numbers) == 1 else None


def _masked_at(line: SourceLine | None) -> SourceLine | None:
    """Return the line that ends the function which a statement gives as a mask; None: it gives none, or a constant."""
    text = text_of(line)
    statement = None if text is None or line is None else text.at(line.number)
    if text is None or line is None or statement is None:
        return None
    words = (x for one in expressions(statement) if isinstance(one, ast.Call) for x in one.keywords)
    names = {last_name(x.value) for x in words if x.arg == "mask"} - {""}
    functions = [x for x in text.tree.body if isinstance(x, ast.FunctionDef) and x.name in names]
    return SourceLine(line.path, last_return(functions[0])) if len(functions) == 1 else None


def stated_at(line: SourceLine | None, value: str, layer: str = "") -> SourceLine | None:
    """Return the line that states a value that a line uses.

    Args:
        line: the line; None: unknown.
        value: the value as code.
        layer: name of the layer that has the value, as the attribute of `self` that it is; "" if none has.
    """
    text = text_of(line)
    statement = None if text is None or line is None else text.at(line.number)
    if text is None or line is None or statement is None:
        return line
    found = next((x for one in _statements(text, statement, layer) if (x := _holds(one, value))), None)
    return line if found is None or _stands_in(statement, line, value) else SourceLine(line.path, found)


def made_at(line: SourceLine | None, layer: str) -> SourceLine | None:
    """Return the line at which a layer is made that a line calls; the line itself if it is not known.

    Args:
        line: the line; None: unknown.
        layer: name of the layer, as the attribute of `self` that it is.
    """
    text = text_of(line)
    if text is None or line is None or (statement := text.at(line.number)) is None or layer not in _called(statement):
        return line
    made = [value.lineno for value in _values(text, statement, layer) if isinstance(value, ast.Call)]
    return SourceLine(line.path, made[0]) if len(made) == 1 else line


def returned_at(line: SourceLine | None) -> SourceLine | None:
    """Return the last `return` of the function whose definition is at a line; the line itself if there is none."""
    text = text_of(line)
    if text is None or line is None or (function := text.function_at(line.number)) is None:
        return line
    return SourceLine(line.path, last_return(function))


def makes_layers(line: SourceLine | None) -> bool:
    """Return whether a line is in a function that makes the layers of a module."""
    text = text_of(line)
    function = None if text is None or line is None else text.function_at(line.number)
    return function is not None and function.name in ("__init__", "setup")


def renamed_at(line: SourceLine | None) -> SourceLine | None:
    """Return the only later line of its function that gives what a line computes another name; else the line itself.

    A statement such as `h = time` computes nothing, so that no operation of a program has its line.
    """
    if line is None or (around := _around(line)) is None:
        return line
    statement, others = around
    names = {target.id for target, _ in assigned(statement) if isinstance(target, ast.Name)}
    pairs = (pair for one in others if one.lineno > line.number for pair in assigned(one))
    found = [x.lineno for _, x in pairs if isinstance(x, ast.Name) and x.id in names]
    return SourceLine(line.path, found[0]) if len(found) == 1 else line


def alias_of(line: SourceLine | None) -> SourceLine | None:
    """Return the only line of its function that gives a value another name, by which a line uses it; else the line."""
    if line is None or (around := _around(line)) is None:
        return line
    statement, others = around
    names = {*_used(statement)}
    pairs = ((one, pair) for one in others if one.lineno < line.number for pair in assigned(one))
    found = [one.lineno for one, (name, x) in pairs if isinstance(x, ast.Name) and last_name(name) in names]
    return SourceLine(line.path, found[0]) if len(found) == 1 else line


def _around(line: SourceLine) -> tuple[ast.stmt, list[ast.stmt]] | None:
    """Return the statement of a line, and those of its function; None: it is in none, or unknown."""
    text = text_of(line)
    statement = None if text is None else text.at(line.number)
    function = None if text is None else text.function_at(line.number)
    return None if statement is None or function is None else (statement, nested(function))


def stating(lines: Sequence[SourceLine], value: str) -> SourceLine | None:
    """Return the first of some lines that states a value itself; None: none does."""
    of_texts = ((line, text) for line in lines if (text := text_of(line)) is not None)
    statements = ((line, text.at(line.number)) for line, text in of_texts)
    return next((line for line, one in statements if one is not None and _stands_in(one, line, value)), None)


def called_at(line: SourceLine | None, functions: Collection[str]) -> SourceLine | None:
    """Return the line of a call of one of these functions whose result a statement uses by a name; None: none does.

    Args:
        line: the line of the statement; None: unknown.
        functions: names of functions.
    """
    text = text_of(line)
    if text is None or line is None or (statement := text.at(line.number)) is None:
        return None
    names = {*_used(statement)}
    made = (value for name in names for value in _values(text, statement, name))
    returned = (x for value in _returned(text, names) for x in ast.walk(value))
    calls = (x for x in itertools.chain(made, returned) if isinstance(x, ast.Call) and last_name(x.func) in functions)
    return next((SourceLine(line.path, call.lineno) for call in calls), None)


def call_in(line: SourceLine | None, functions: Collection[str]) -> SourceLine | None:
    """Return the line of the last call of one of these functions in the function that begins at a line; None: of none.

    Args:
        line: the line; None: unknown.
        functions: names of functions.
    """
    text = text_of(line)
    function = None if text is None or line is None else text.function_at(line.number)
    if function is None or line is None:
        return None
    calls = (x for x in ast.walk(function) if isinstance(x, ast.Call) and last_name(x.func) in functions)
    lines = [call.lineno for call in calls]
    return SourceLine(line.path, max(lines)) if lines else None


def named_at(line: SourceLine | None, path: str) -> SourceLine | None:
    """Return the line of the file that gives a layer its name, as an attribute or a key; the line itself if none does.

    Args:
        line: a line of the file; None: unknown.
        path: names of modules, the outer ones first, and of an array: "blocks.0.norm.scale".
    """
    text = text_of(line)
    if text is None or line is None:
        return line
    for part in reversed(path.split(".")[:-1]):
        found = [value.lineno for name, value in _named(text.tree) if name == part]
        if len(found) == 1:
            return SourceLine(line.path, found[0])
    return line


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of attributes and keys with their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield from ((last_name(x), value) for x, value in assigned(node) if isinstance(x, ast.Attribute))
        elif isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values, strict=True)
            yield from ((str(key.value), value) for key, value in keys if isinstance(key, ast.Constant))


def text_of(line: SourceLine | None) -> FileText | None:
    """Return the file of a line; None: it is unknown, or no Python."""
    if line is None:
        return None
    try:
        return FileText("".join(linecache.getlines(line.path)))
    except SyntaxError:
        return None


def _stands_in(statement: ast.stmt, line: SourceLine, value: str) -> bool:
    """Return whether the line of a statement states a value itself."""
    return any(x.lineno == line.number and _is(x, value) for x in expressions(statement))


def _holds(node: ast.AST, value: str) -> int | None:
    """Return the line at which a statement or an expression states a value; None: it does not hold it."""
    inside = expressions(node) if isinstance(node, ast.stmt) else ast.walk(node)
    return next((x.lineno for x in inside if isinstance(x, ast.expr) and _is(x, value)), None)


def _is(node: ast.expr, value: str) -> bool:
    """Return whether code without names is a value.

    >>> [_is(ast.parse(code, mode="eval").body, "0.5") for code in ("0.5", "1 / 2", "WIDTH ** -0.5")]
    [True, True, False]
    """
    try:
        wanted = ast.parse(value, mode="eval").body
    except SyntaxError:  # a word of the cause
        return False
    wanted = next((x for x in ast.walk(wanted) if isinstance(x, ast.List)), wanted)  # as of new_tensor([1, 2])
    if isinstance(wanted, ast.List):
        if not isinstance(node, ast.List | ast.Tuple) or len(node.elts) != len(wanted.elts):
            return False
        return all(_are_equal(*pair) for pair in zip(node.elts, wanted.elts, strict=True))
    return _are_equal(node, wanted)


def _are_equal(node: ast.expr, other: ast.expr) -> bool:
    """Return whether the code of two values, without names, is that of equal ones."""
    number = number_of(other, {})
    if number is None:
        return isinstance(other, ast.Constant) and ast.dump(other) == ast.dump(node)
    there = number_of(node, {})
    return there is not None and math.isclose(there, number, rel_tol=1e-9)


def _statements(text: FileText, statement: ast.stmt, layer: str) -> Iterator[ast.AST]:
    """Yield a statement, then the values of its names: constants, local numbers and the call that makes the layer.

    A function that makes layers states values by keywords.
    """
    yield statement
    yield from _keywords(text, {*_used(statement)})
    fresh: list[ast.AST] = [statement]
    for _ in range(FOLLOWED):
        names = {name for node in fresh for name in _used(node)}
        values = [value for name in sorted(names - {layer}) for value in _values(text, statement, name)]
        lists = [value for value in values if isinstance(value, ast.List | ast.Tuple)]
        fresh = [*(value for value in values if number_of(value, text.constants) is not None), *lists]
        fresh += _values(text, statement, layer) if layer in names else []
        yield from fresh
    yield from _made_before(text, statement)


def _made_before(text: FileText, statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the calls that make a statement's values, by the names of its function."""
    function = text.function_at(statement.lineno)
    names = {x.id for x in expressions(statement) if isinstance(x, ast.Name)}
    for one in nested(function) if function is not None else ():
        pairs = assigned(one) if one.lineno < statement.lineno else ()
        yield from (x for to, x in pairs if getattr(to, "id", "") in names and isinstance(x, ast.Call))


def _keywords(text: FileText, names: Collection[str]) -> Iterator[ast.expr]:
    """Yield the values of keywords in what some functions of the file return."""
    yield from (x.value for value in _returned(text, names) for x in ast.walk(value) if isinstance(x, ast.keyword))


def _returned(text: FileText, names: Collection[str]) -> Iterator[ast.expr]:
    """Yield what some functions of the file return."""
    for function in (x for x in text.tree.body if isinstance(x, ast.FunctionDef) and x.name in names):
        yield from (x.value for x in ast.walk(function) if isinstance(x, ast.Return) and x.value is not None)


def _used(node: ast.AST) -> Iterator[str]:
    inside = expressions(node) if isinstance(node, ast.stmt) else ast.walk(node)
    yield from (last_name(x) for x in inside if isinstance(x, ast.Name | ast.Attribute))


def _called(statement: ast.stmt) -> set[str]:
    """Return the attributes of `self` that a statement calls."""
    calls = (x.func for x in expressions(statement) if isinstance(x, ast.Call))
    return {x.attr for x in calls if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "self"}


def _values(text: FileText, statement: ast.stmt, name: str) -> Iterator[ast.expr]:
    """Yield the values that a statement's name may have: at the top of the file, in its class, or in its function."""
    around = [x for x in text.statements if isinstance(x, ast.ClassDef) and _spans(x, statement)]
    scope = around[-1:] or [x for x in text.statements if isinstance(x, ast.FunctionDef) and _spans(x, statement)][-1:]
    inside = [x for one in scope for x in ast.walk(one) if isinstance(x, ast.stmt)]
    for one in [*text.tree.body, *inside]:
        yield from (value for target, value in assigned(one) if last_name(target) == name)


def _spans(outer: ast.stmt, inner: ast.stmt) -> bool:
    return outer.lineno <= inner.lineno <= (outer.end_lineno or outer.lineno)
