"""The one difference of two expressions, in words."""

import pytest

from jaxddp.parity.diagnosis.forced.trees import Tree, difference, operation
from jaxddp.parity.report.sentences import sentence

X, Y = Tree("x", value=0), Tree("y", value=1)


def of(name: str, *operands: Tree | float) -> Tree:
    given = [x if isinstance(x, Tree) else Tree(f"{x:g}") for x in operands]
    return operation(name, name, given, at=len(given))


@pytest.mark.parametrize(
    ("jax", "torch", "fault", "says"),
    [
        (of("sub", 2, X), of("rsub", X, 1), "number", "the number 2 instead of 1 in sub"),
        (of("square", X), of("pow", X, 4), "number", "the number 2 instead of 4 in pow"),
        (of("div", X, 4), of("div", 4, X), "other_order", "the operands of div in the other order"),
        (of("add", X, of("mul", Y, 3)), of("add", of("mul", 3, Y), of("exp", X)), "call_left_out", "exp left out of x"),
        (of("exp", of("mul", X, Y)), of("exp", X), "call_added", "added: x * y instead of x, in exp"),
        (of("add", X, Y), of("mul", Y, X), "other_function", "add instead of mul of x and y"),
        (of("tanh", of("neg", X)), of("tanh", of("neg", Y)), "other_operand", "x in place of y in neg"),
        (X, of("div", Y, X), "operand_left_out", "y left out of div"),
    ],
)
def test_one_difference_is_said(jax: Tree, torch: Tree, fault: str, says: str) -> None:
    found = difference(jax, torch)
    assert found is not None and found.what is not None
    assert (found.fault, sentence(found.what)) == (fault, says)


@pytest.mark.parametrize(
    ("jax", "torch"),
    [
        (of("add", X, Y), of("add", Y, X)),  # equal
        (of("sub", of("exp", X), 1), of("sub", of("log", X), 2)),  # two differences
        (of("div", Y, X), of("exp", X)),
        (of("max", Tree("dim=1", value=7)), of("max", Tree("dim=2", value=7))),  # options are no operands
    ],
)
def test_no_difference_and_several_are_not_said(jax: Tree, torch: Tree) -> None:
    assert difference(jax, torch) is None


def test_two_values_of_one_text_are_two() -> None:
    assert difference(of("exp", Tree("mul(...)", value=3)), of("exp", Tree("mul(...)", value=4))) is None
    assert str(of("sub", of("neg", X), of("relu", Y))) == "(-x - relu(y))"
