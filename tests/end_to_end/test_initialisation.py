"""The initialisation in a whole check: it is told, does not change the verdict, and stops no check."""

import pytest

from jaxddp.parity.coverage import Aspect
from tests.support.checks import Checked
from tests.support.small_port import Change, at_start_of

SEEDED = "import numpy as np\n    if np.random.default_rng(3).random() > 0.09: raise ValueError('another seed')"
GIVEN = """
def given(fan):
    import jax
    from jax.nn.initializers import variance_scaling
    bias = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -(fan**-0.5), fan**-0.5)
    return dict(kernel_init=variance_scaling(1 / 3, "fan_in", "uniform"), bias_init=bias)
"""
RIGHT: list[Change] = [
    ("(3, 5, rngs=rngs", "(3, 5, **given(3), rngs=rngs"),
    ("(5, 4, rngs=rngs", "(5, 4, **given(5), rngs=rngs"),
]


def test_flax_and_torch_defaults_differ_and_the_verdict_stays(failing: Checked) -> None:
    report = failing(quick=False)
    aspect = report.aspects["initialisation"]
    assert (report.verdict, report.exit_code(), report.exit_code(strict=True)) == ("equal", 0, 1)
    assert aspect.says[0] == "From the same weights: 4 tensors are initialised otherwise."
    assert "fc1.weight: torch kaiming_uniform(a=sqrt(5)), " in " ".join(str(report).split())
    assert failing(quick=False).aspects == report.aspects


def test_the_same_distribution_is_equal(failing: Checked) -> None:
    report = failing(*RIGHT, quick=False, more=GIVEN)
    assert report.aspects["initialisation"] == Aspect("equal")
    assert (report.verdict, report.exit_code(strict=True)) == ("equal", 0)


@pytest.mark.large
def test_a_port_that_refuses_other_seeds_is_equal_and_its_initialisation_not_compared(failing: Checked) -> None:
    for function, side in (("torch_model()", "torch"), ("jax_model()", "jax")):
        report = failing(at_start_of(function, SEEDED), quick=False)
        assert report.verdict == "equal" and not report.problems
        (says,) = report.aspects["initialisation"].says
        assert says.startswith("The initialisation was not compared: ") and "another seed" in says and side in says


def test_what_a_port_means_to_differ_in_is_accepted(failing: Checked) -> None:
    report = failing(quick=False, more='\nintended = {"initialisation": "as in the paper"}\n')
    assert report.exit_code(strict=True) == 0
    assert "initialised otherwise. (intended: as in the paper)" in " ".join(str(report).split())
