"""The user's function in which operations are."""

from pathlib import Path

import pytest

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.functions import common_function

FILE = """\
def rotated(x):
    half = x / 2
    return half - x


def loss(x):
    return rotated(x) + rotated(2 * x)


class Model:
    def __call__(self, x):
        return x + 1
"""


@pytest.mark.parametrize(
    ("chains", "users", "name"),
    [
        ([(2, 7, 20), (3, 7, 20)], [(7, 20)], "rotated"),
        ([(2, 7, 20)], [(3, 7, 20)], ""),  # it is not what the function returns
        ([(2, 7, 20)], [(3, 8, 20)], "rotated"),  # another call of the function
        ([(2, 7, 20), (7, 20)], [(20,)], "loss"),  # one of the operations is outside
        ([(2, 7, 20), (3, 8, 20)], [], ""),  # called from two lines
        ([(2,), (3,)], [], ""),  # the function that the check calls
        ([(12, 20)], [], ""),  # a method that every layer has
        ([], [(20,)], ""),
    ],
)
def test_operations_are_in_the_innermost_function_that_has_all_of_them(
    chains: list[tuple[int, ...]], users: list[tuple[int, ...]], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    given, after = ([[SourceLine(str(path), line) for line in chain] for chain in of] for of in (chains, users))
    assert common_function(given, after) == name
