"""Lines at which a port loses digits in float32, and nothing in float64, are named."""

import pytest

from jaxddp.parity.findings import Cause
from jaxddp.parity.report.sentences import sentences
from tests.support.checks import Checked
from tests.support.small_port import Change

TORCH, JAX = "self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(nnx.tanh(self.fc1(x)))"
# A variance that cancels: in float32 its error is some 300^2 eps.
CANCELLING: tuple[Change, ...] = (
    (
        f"return {TORCH}",
        "h = self.fc1(x) + 300.0\n        return self.fc2(torch.tanh(F.layer_norm(h, (5,))))",
    ),
    (
        f"            return {JAX}",
        """            h = self.fc1(x) + 300.0
            mean = h.mean(-1, keepdims=True)
            variance = (h * h).mean(-1, keepdims=True) - mean * mean
            return self.fc2(nnx.tanh((h - mean) / (variance + 1e-5) ** 0.5))""",
    ),
)
CAST: tuple[Change, ...] = (
    (
        f"            return {JAX}",
        """            h = self.fc1(x)
            if h.dtype == np.float32:
                h = h.astype("bfloat16").astype(np.float32)
            return self.fc2(nnx.tanh(h))""",
    ),
)


def line_of(cause: Cause) -> str:
    assert cause.jax is not None
    return cause.jax.text[cause.jax.line - cause.jax.first]


def cause_of(checked: Checked, *changes: Change) -> Cause:
    report = checked(*changes, numerics=True)
    (difference,) = report.differences
    assert difference.kind == "numeric" and difference.cause is not None, str(report)
    return difference.cause


def test_a_cast_to_bfloat16_in_float32_alone_is_named_with_its_line(checked: Checked) -> None:
    cause = cause_of(checked, *CAST)
    assert cause.names == ("rounded_to_16_bits",) and sentences(cause) == ("values are rounded to bfloat16",)
    assert 'h.astype("bfloat16")' in line_of(cause)
    assert cause.residual < 1e-6  # measured: 1e-7, with the cast 2e-3


@pytest.mark.large
def test_a_formula_that_cancels_is_named_with_its_lines(checked: Checked) -> None:
    cause = cause_of(checked, *CANCELLING)
    assert cause.names == ("digits_lost",)
    assert "mean * mean" in line_of(cause)
    assert cause.residual < 1e-4 and cause.measured.startswith("with port.py:")  # measured: 3e-5


@pytest.mark.large
def test_a_loss_of_digits_on_both_sides_is_no_difference(checked: Checked) -> None:
    def lines(indent: str, keep: str) -> str:
        statistics = f"m = h.mean(-1, {keep}=True)", f"v = (h * h).mean(-1, {keep}=True) - m * m"
        return f"\n{indent}".join(["h = self.fc1(x) + 30.0", *statistics, ""])

    normed = "(h - m) / (v + 1e-5) ** 0.5"
    of_torch = f"{lines(' ' * 8, 'keepdim')}return self.fc2(torch.tanh({normed}))"
    of_jax = f"{lines(' ' * 12, 'keepdims')}return self.fc2(nnx.tanh({normed}))"
    report = checked((f"return {TORCH}", of_torch), (f"return {JAX}", of_jax), numerics=True)
    assert report.verdict == "equal", str(report)
