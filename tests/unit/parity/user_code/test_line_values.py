"""Lines of the user's functions that first compute another value."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.line_values import MOST_LINES, LineValues, Noted, first_apart

RIGHT = """\
import numpy as np


def data():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (4, 3))
    return x, 3 * np.sin(x[:, 0])


def batch(step, rank):
    x, y = data()
    for k in range(2):
        x = x + k
    return {"x": x, "y": y}
"""


def noted(tmp_path: Path, name: str, text: str) -> list[Noted]:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    function: Callable[..., Any] = runpy.run_path(str(path))["batch"]
    with LineValues() as values:
        function(0, 1)
    return values.noted


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("uniform(0, 1", "uniform(-1, 1", 6),  # a variable
        ("3 * np.sin", "np.sin", 7),  # what a function returns
        ("x + k", "x - k", 13),  # a variable in a loop
        ("x = rng.uniform(0, 1, (4, 3))", "x = rng.uniform(0, 1, (4, 3)); x[0] = 0", 6),  # in place
    ],
)
def test_the_first_line_that_computes_another_value(old: str, new: str, line: int, tmp_path: Path) -> None:
    assert RIGHT.count(old) == 1
    torch, jax = noted(tmp_path, "torch", RIGHT), noted(tmp_path, "jax", RIGHT.replace(old, new))
    assert first_apart(jax, torch) == SourceLine(str(tmp_path / "jax.py"), line)
    assert first_apart(torch, jax) == SourceLine(str(tmp_path / "torch.py"), line)


def test_functions_that_compute_the_same_in_other_steps_are_not_apart(tmp_path: Path) -> None:
    other = RIGHT.replace(
        "    x = rng.uniform(0, 1, (4, 3))\n    return x,", "    return (x := rng.uniform(0, 1, (4, 3))),"
    )
    assert other != RIGHT
    torch, jax = noted(tmp_path, "torch", RIGHT), noted(tmp_path, "jax", other)
    assert first_apart(jax, torch) is first_apart(torch, jax) is None


def test_a_line_that_both_run_is_not_the_one_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    path.write_text(
        "def torch_batch(step, rank):\n    x = 10 * step + rank\n    return {'x': x}\n"
        "def jax_batch(step, rank):\n    return torch_batch(step, 5)\n"
    )
    functions = runpy.run_path(str(path))
    sides = {}
    for side in ("jax", "torch"):
        with LineValues() as values:
            functions[f"{side}_batch"](2, 1)
        sides[side] = values.noted
    assert first_apart(sides["jax"], sides["torch"]) == SourceLine(str(path), 5)
    assert first_apart(sides["torch"], sides["jax"]) is None


def test_a_trace_ends(tmp_path: Path) -> None:
    before = sys.gettrace()
    long = noted(tmp_path, "long", f"def batch(step, rank):\n    for k in range({2 * MOST_LINES}):\n        step = k\n")
    assert len(long) <= 2 * MOST_LINES and sys.gettrace() is before


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    text = 'def batch(step, rank):\n    name, flag = "x", True\n    return object(), [2.5], {"a": 3}\n'
    assert [x.total for _, x in noted(tmp_path, "port", text)] == [2.5, 3.0]
