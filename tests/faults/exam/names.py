"""Operators on statements and names: what is computed and not used, and what is used instead of it."""

import ast
from collections.abc import Iterator

from .source import Source, defined_names


def statements_left_out(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Leave out a statement whose names are bound before it, or that binds none."""
    function = source.function(node)
    if function is None or not isinstance(node, ast.stmt):
        return
    if "super()" in source.code(node):  # nothing works without it
        return
    if isinstance(node, ast.Expr | ast.AugAssign | ast.If | ast.For | ast.With):
        yield *source.span(node), "pass"
    elif isinstance(node, ast.Assign):
        into = all(isinstance(target, ast.Subscript) for target in node.targets)
        names = defined_names(node)
        if into or (names and names <= {*_bound_before(node, function, source)}):
            yield *source.span(node), "pass"


def _bound_before(node: ast.AST, function: ast.FunctionDef, source: Source) -> list[str]:
    """Return the names that a function binds before a node: its parameters and assigned names, in their order."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    statement = next((x for x in (node, *source.ancestors(node)) if isinstance(x, ast.stmt)), node)
    start = source.span(statement)[0]
    inner = [x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    stored = [x for x in inner if source.function(x) is function and source.span(x)[0] < start]
    names += [x.id for x in sorted(stored, key=source.span) if not _in_comprehension(x, source)]
    return list(dict.fromkeys(name for name in names if name != "_"))


def _in_comprehension(node: ast.AST, source: Source) -> bool:
    return any(isinstance(parent, ast.comprehension) for parent in source.ancestors(node))


def other_names(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace a name by the one bound before it, a constant by the next one, or an attribute of `self` by the next."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        function = source.function(node)
        bound = [] if function is None else _bound_before(node, function, source)
        if node.id in bound and len(bound) > 1:
            yield *source.span(node), bound[bound.index(node.id) - 1]
        elif (constants := _constants(source)) and node.id in constants and len(constants) > 1:
            yield *source.span(node), constants[(constants.index(node.id) + 1) % len(constants)]
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and source.code(node.value) == "self":
        attributes = _attributes(node, source)
        if node.attr in attributes and len(attributes) > 1:
            yield *source.span(node), f"self.{attributes[(attributes.index(node.attr) + 1) % len(attributes)]}"


def _constants(source: Source) -> list[str]:
    """Return the names in capitals that a file assigns, in their order."""
    nodes = [
        node for statement in source.tree.body if isinstance(statement, ast.Assign) for node in ast.walk(statement)
    ]
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [name for name in dict.fromkeys(stored) if name.isupper()]


def _attributes(node: ast.AST, source: Source) -> list[str]:
    """Return the attributes of `self` that the class around a node sets, in their order."""
    owner = next((parent for parent in source.ancestors(node) if isinstance(parent, ast.ClassDef)), None)
    nodes = [] if owner is None else [x for x in ast.walk(owner) if isinstance(x, ast.Attribute)]
    stored = [x for x in nodes if isinstance(x.ctx, ast.Store) and source.code(x.value) == "self"]
    return list(dict.fromkeys(x.attr for x in sorted(stored, key=source.span)))


def other_results(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Return a name bound before instead of the result, or two results in the other order."""
    function = source.function(node)
    if not isinstance(node, ast.Return) or node.value is None or function is None:
        return
    if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
        first, second, *rest = map(source.code, node.value.elts)
        yield *source.span(node.value), ", ".join([second, first, *rest])
    for name in _bound_before(node, function, source)[-1:]:
        yield *source.span(node.value), name


def decorators_left_out(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Leave out a decorator of a function or a class."""
    for decorator in getattr(node, "decorator_list", ()):
        start, end = source.span(decorator)
        yield source.text.rindex("@", 0, start), end, ""
