"""Where a port's functions are defined: in the program, or in a file next to it from which it imports them."""

import ast
import inspect
import linecache
from pathlib import Path
from typing import Any

from jaxddp.parity.operations import SourceLine, is_of_user
from jaxddp.parity.user_code.file_text import last_return

# Stage that differs -> names of a port whose code may compute it, for causes without a line.
LOSS, STEP, OPTIMIZER = ("loss", "step"), ("step",), ("optimizer", "step")
OF_STAGE = {
    **{"local_loss": LOSS, "local_gradients": LOSS, "gradients": STEP, "clipped_gradients": STEP},
    **{"update": OPTIMIZER, "buffers": LOSS},
}


def home_of_stage(port: Path, stage: str, side: str) -> SourceLine | None:
    """Return the line of the function of a side, "jax" or "torch", that computes a stage; None: unknown."""
    homes = (home_of(port, f"{side}_{name}") for name in OF_STAGE.get(stage, ()))
    return next((home for home in homes if home is not None), None)


def home_of(port: Path, name: str) -> SourceLine | None:
    """Return the line at which a name of a port is defined: that of a function's last `return`; None: unknown."""
    try:
        body = ast.parse(port.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return SourceLine(str(port), last_return(statement))
        if isinstance(statement, ast.Assign) and name in map(ast.unparse, statement.targets):
            return SourceLine(str(port), statement.lineno)
        if isinstance(statement, ast.ImportFrom) and statement.module:
            there = port.parent.joinpath(*statement.module.split(".")).with_suffix(".py")
            inside = [x.name for x in statement.names if name in (x.asname, x.name)]
            if inside and there != port and there.exists():
                return home_of(there, inside[0])
    return None


def line_of_function(function: Any) -> SourceLine | None:
    """Return the line that begins a function of the user's; None: it is a library's, or no function.

    >>> line_of_function(print) is line_of_function(None) is line_of_function(ast.parse) is None
    True
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or not is_of_user(code.co_filename):
        return None
    linecache.checkcache(code.co_filename)
    number = code.co_firstlineno
    while linecache.getline(code.co_filename, number).lstrip().startswith("@"):
        number += 1
    return SourceLine(code.co_filename, number)
