"""Operators on calls: keywords, arguments, and the called function."""

import ast
from collections.abc import Iterator
from itertools import pairwise

from .siblings import ADDED, KEYWORDS, NEEDED, VALUES, siblings_of
from .source import Source

# Keywords of one framework only.
OF_TORCH = frozenset({"betas", "amsgrad"})
OF_JAX = frozenset({"kernel_init", "bias_init", "param_dtype", "dtype", "b2", "mu_dtype", "keepdims", "epsilon"})
# Functions that are no transformation of their argument.
NOT_LEFT_OUT = frozenset({"super", "range", "len", "zip", "enumerate", "isinstance", "slice", "getattr", "print"})


def keywords_left_out(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Leave out a keyword argument, so that its default acts."""
    if not isinstance(node, ast.Call):
        return
    arguments = sorted([*node.args, *node.keywords], key=source.span)
    for number, argument in enumerate(arguments):
        if not isinstance(argument, ast.keyword) or argument.arg in (None, *NEEDED):
            continue
        start, end = source.span(argument)
        if number:
            start = source.span(arguments[number - 1])[1]
        elif len(arguments) > 1:
            end = source.span(arguments[1])[0]
        yield start, end, ""


def keywords_added(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Give a function a keyword that it does not have here, with a value other than the default."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    given = {keyword.arg for keyword in node.keywords}
    end = source.span(node)[1] - 1
    for code in ADDED.get(node.func.attr, ()):
        name = code.partition("=")[0]
        if name not in given and _is_of(name, half):
            joint = ", " if node.args or node.keywords else ""
            yield end, end, joint + code.format(source.code(node.func.value))


def _is_of(keyword: str, half: str) -> bool:
    """Return whether a keyword is one of a half's framework, or of both."""
    return keyword not in (OF_JAX if half == "torch" else OF_TORCH)


def keyword_values(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Give a keyword a usual value or that of the keyword before it, or give its value to another keyword."""
    if not isinstance(node, ast.Call):
        return
    named = [keyword for keyword in node.keywords if keyword.arg and keyword.arg not in NEEDED]
    for keyword in named:
        span, name = source.span(keyword), keyword.arg or ""
        for value in VALUES.get(name, ()):
            yield *span, f"{name}={value}"
        for sibling in KEYWORDS.get(name, ()):
            yield *span, f"{sibling}={source.code(keyword.value)}"
    for keyword, following in pairwise(named):
        value = source.code(keyword.value)
        yield *source.span(following), f"{following.arg}={value}"


def arguments_swapped(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Exchange two arguments that follow each other."""
    if not isinstance(node, ast.Call):
        return
    for first, second in pairwise(node.args):
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            continue
        (start, start_end), (end_start, end) = source.span(first), source.span(second)
        between = source.text[start_end:end_start]
        yield start, end, f"{source.code(second)}{between}{source.code(first)}"


def calls_left_out(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace a call by its argument, or a method's result by the object."""
    if not isinstance(node, ast.Call) or isinstance(source.parents.get(node), ast.Expr):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in NOT_LEFT_OUT or name[:1].isupper():
        return
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value, source):
        yield *source.span(node), source.operand(node.func.value)
    for argument in node.args[:2]:
        if not isinstance(argument, ast.Starred | ast.Constant | ast.Lambda):
            yield *source.span(node), source.operand(argument)


def _is_module(node: ast.AST, source: Source) -> bool:
    """Return whether an expression starts with an imported name, or is `self`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for statement in source.tree.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }
    return isinstance(node, ast.Name) and node.id in {*imported, "self"}


def function_siblings(node: ast.AST, source: Source, half: str) -> Iterator[tuple[int, int, str]]:
    """Replace a function or a method by another of its namespace."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        end = source.span(node)[1]
        for sibling in siblings_of(node.attr, half):
            yield end - len(node.attr), end, sibling
