"""Where a port's functions are defined: in the port file, or in a file beside it from which it imports them."""

import ast
from pathlib import Path
from typing import NamedTuple

# Stage that differs -> names of a port whose code may compute it, for causes without a line.
LOSS, STEP, OPTIMIZER = ("loss", "step"), ("step",), ("optimizer", "step")
OF_STAGE = {
    **{"local_loss": LOSS, "local_gradients": LOSS, "gradients": STEP, "clipped_gradients": STEP},
    **{"update": OPTIMIZER, "buffers": LOSS},
}


class Home(NamedTuple):
    """A line of a file.

    Attributes:
        path: the file.
        line: number of the line.
    """

    path: str
    line: int


def home_of_stage(port: Path, stage: str, side: str) -> Home | None:
    """Return the line of the function of a side, "flax" or "torch", that computes a stage; None: unknown."""
    homes = (home_of(port, f"{side}_{name}") for name in OF_STAGE.get(stage, ()))
    return next((home for home in homes if home is not None), None)


def home_of(port: Path, name: str) -> Home | None:
    """Return the line at which a name of a port is defined: that of a function's last `return`; None: unknown."""
    try:
        body = ast.parse(port.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            ends = [x.lineno for x in ast.walk(statement) if isinstance(x, ast.Return)]
            return Home(str(port), max(ends, default=statement.lineno))
        if isinstance(statement, ast.Assign) and name in map(ast.unparse, statement.targets):
            return Home(str(port), statement.lineno)
        if isinstance(statement, ast.ImportFrom) and statement.module:
            there = port.parent.joinpath(*statement.module.split(".")).with_suffix(".py")
            inside = [x.name for x in statement.names if name in (x.asname, x.name)]
            if inside and there != port and there.exists():
                return home_of(there, inside[0])
    return None
