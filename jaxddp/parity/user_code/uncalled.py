"""Find the functions of a user's files that a run never called."""

import ast
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.file_text import last_name

Function = ast.FunctionDef | ast.AsyncFunctionDef


@contextmanager
def calls_noted(port: str) -> Iterator[set[SourceLine]]:
    """Collect the first lines of all functions in a port's folder that this thread calls meanwhile.

    Args:
        port: path of the port's file.
    """
    folder, called, before = Path(port).absolute().parent, set[SourceLine](), sys.gettrace()
    of_folder: dict[str, bool] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = code.co_filename
        if path not in of_folder:
            of_folder[path] = Path(path).absolute().parent == folder
        if of_folder[path]:
            called.add(SourceLine(str(Path(path).absolute()), code.co_firstlineno))

    sys.settrace(note)
    try:
        yield called
    finally:
        sys.settrace(before)


def uncalled(port: str, called: Iterable[SourceLine], known: Collection[str]) -> list[tuple[str, SourceLine]]:
    """Return the functions and methods that no call was seen of, though nothing else accounts for that.

    Left out are those that the files' own programs, their decorated functions and the `known` ones may call, which a
    run does not, and special methods.

    Args:
        port: path of the port's file; functions of other files count if some function of their file was called.
        called: first lines of the functions that were called.
        known: names that the port gives the check.

    Returns:
        The names, with the lines of their definitions.
    """
    lines = {*called}
    trees = {path: _tree(path) for path in sorted({str(Path(port).absolute()), *(line.path for line in lines)})}
    functions = [(path, function) for path, tree in trees.items() for function in _functions(tree)]
    unseen = [(path, x) for path, x in functions if not {SourceLine(path, n) for n in _first_lines(x)} & lines]
    bodies, reached = {x.name: x for _, x in unseen}, {*known}
    left = {name for tree in trees.values() for name in _names_at_top(tree)}
    left |= {*known, *(name for name, x in bodies.items() if x.decorator_list)}
    while left:
        reached |= left
        left = {name for caller in left if caller in bodies for name in _names(bodies[caller])} - reached
    alone = [(path, x) for path, x in unseen if x.name not in reached and not x.name.startswith("__")]
    return [(x.name, SourceLine(path, x.lineno)) for path, x in alone]


def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Yield the functions of a file and the methods of its classes."""
    for node in tree.body:
        yield from (x for x in (node.body if isinstance(node, ast.ClassDef) else [node]) if isinstance(x, Function))


def _first_lines(function: Function) -> Iterator[int]:
    """Yield the lines that Python may give as a function's first."""
    yield from (x.lineno for x in (function, *function.decorator_list))


def _names_at_top(tree: ast.Module) -> set[str]:
    """Return the names that a file uses outside of its functions, as in its own program."""
    return {name for node in tree.body if not isinstance(node, Function | ast.ClassDef) for name in _names(node)}


def _names(node: ast.AST) -> set[str]:
    return {last_name(x) for x in ast.walk(node) if isinstance(x, ast.Name | ast.Attribute)}
