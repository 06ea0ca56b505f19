"""Numbers that are not finite are told first: on one side they are a difference, on both nothing can be compared."""

import math

import pytest

from jaxddp.parity.report.sentences import sentences
from tests.support.checks import STEPS, Checked
from tests.support.small_port import Change, own_optimizers

# Square roots of negative numbers in the second step.
ROOTS = [
    ("torch.tanh(self.fc1(x))", "torch.tanh(self.fc1(x).sqrt())"),
    ("nnx.tanh(self.fc1(x))", 'nnx.tanh(__import__("jax").numpy.sqrt(self.fc1(x)))'),
    ("rng.normal(1, 1, (12, 3))", "rng.normal(1, 1, (12, 3)) * (1e-9 if step == 0 else 1)"),
    ("self.fc1 = torch.nn.Linear(3, 5)", "self.fc1 = torch.nn.Linear(3, 5); torch.nn.init.ones_(self.fc1.bias)"),
]
# The square root of a sum that is 0: the loss is finite, its derivative is 0 times infinity.
LABELS = """
    from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
    return cross_entropy(model(batch["x"]), batch["y"]).mean()"""
ENDS = (
    ('F.cross_entropy(model(batch["x"]), batch["y"])', '(y := model(batch["x"])).mean() + ((y - y) ** 2).sum() ** 0.5'),
    (LABELS, '\n    y = model(batch["x"])\n    return y.mean() + __import__("jax").numpy.sqrt(((y - y) ** 2).sum())'),
)
# Two of the weights have a gradient of 0, which Adam divides by a root of 0.
DEAD = ("rng.normal(1, 1, (12, 3))", "rng.normal(1, 1, (12, 3)) * [1, 1, 0]")
NOTHING_FROM_HERE = "; nothing is compared from this step on"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("side", "change", "origin"),
    [
        ("jax", ROOTS[1], "the first non-finite value arises before layer fc2, whose input is not finite"),
        ("jax", ('batch["y"]).mean()', 'batch["y"]).mean() * np.nan'), "no layer's output shows it: look in the loss"),
        (
            "torch",
            (
                "return TorchNet()",
                "(net := TorchNet()).fc1.register_forward_hook(lambda m, x, y: y * np.nan)\n    return net",
            ),
            "the first non-finite value arises in layer fc1",
        ),
    ],
    ids=["layer of jax", "loss of jax", "layer of torch"],
)
def test_a_loss_that_is_not_finite_on_one_side_is_reported_first(
    side: str, change: Change, origin: str, failing: Checked
) -> None:
    report = failing(change, numerics=True)
    assert (report.verdict, report.problems, report.numerics) == ("different", (), {})
    (found,) = report.differences
    assert (found.stage, found.step, found.not_finite, found.detail) == ("local_loss", 1, side, origin)
    other = "torch" if side == "jax" else "jax"
    told = f"different: The local loss is finite in {other} and not in {side}, first at step 1 in loss\n  {origin}\n"
    assert told in str(report)
    assert "unexplained" not in str(report) and "residual inf" not in str(report) and "float32" not in str(report)


def test_what_makes_torchs_loss_no_number_has_its_name(failing: Checked) -> None:
    of_torch = ("torch.tanh(self.fc1(x))", "(self.fc1(x) ** 2 - 1000).sqrt()")
    of_jax = ("nnx.tanh(self.fc1(x))", "(self.fc1(x) ** 2 + 1000) ** 0.5")
    (found,) = failing(of_torch, of_jax).differences
    assert (found.stage, found.step, found.not_finite) == ("local_loss", 1, "torch")
    assert found.cause is not None and found.cause.names == ("other_function",), found
    assert sentences(found.cause) == ("add by 1000 instead of sub",)
    assert found.cause.residual < 1e-12  # measured: 2e-16
    assert found.cause.jax is not None and found.cause.jax.itself.endswith("+ 1000) ** 0.5)")


GRADIENTS_OF_ALL = (
    "the local gradients of all tensors are not finite, nor are jax's; the loss is finite, so they arise in "
)
ADAM = own_optimizers("Adam(parameters, lr=0.01, eps=0)", "optax.adam(0.01, eps=0)")
# Changes, steps that are compared before it, and what is said of it.
ON_BOTH_SIDES = {
    "loss": (
        ROOTS,
        1,
        "a finite number, nor is jax's; the first non-finite value arises before layer fc2, whose input is not finite",
    ),
    "gradients": (ENDS, 0, f"{GRADIENTS_OF_ALL}its derivative"),
    "update": ((DEAD, ADAM), 0, "values of the update of fc1.weight are not finite, nor are jax's"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("changes", "before", "says"), ON_BOTH_SIDES.values(), ids=ON_BOTH_SIDES)
def test_what_is_not_finite_on_both_sides_is_no_difference(
    changes: tuple[Change, ...], before: int, says: str, failing: Checked
) -> None:
    """Nothing is compared from there on."""
    report = failing(*changes)
    (problem,) = report.problems
    assert (report.verdict, report.differences, problem.where) == ("incomplete", (), f"step {before + 1}")
    assert f"{says}{NOTHING_FROM_HERE}" in problem.message
    assert {len(result.residuals) for result in report.stages.values()} == ({before} if before else set())
    assert len(report.losses) == STEPS and math.isfinite(report.losses[0][0])
    assert str(report).index(f"problem: torch: step {before + 1}: ") < str(report).index("incomplete: ")


def test_gradients_that_are_not_finite_on_one_side_are_a_difference(failing: Checked) -> None:
    report = failing(ENDS[0], (LABELS, '\n    return model(batch["x"]).mean()'))
    assert (report.verdict, report.problems) == ("different", ())
    first = report.differences[0]
    assert (first.stage, first.step, first.tensor, first.not_finite) == ("local_gradients", 1, "all tensors", "torch")
    assert first.detail == "the loss is finite, so they arise in its derivative"
