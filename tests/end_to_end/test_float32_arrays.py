"""Arrays that are declared in float32: a remark if nothing differs with them in float64, else a difference."""

from pathlib import Path

import pytest

from jaxddp.parity.workers import Workers
from tests.support.checks import Checked, checker
from tests.support.small_port import Change, own_optimizers

MOMENTUM = own_optimizers(
    "SGD(parameters, lr=0.1, momentum=0.9)", 'optax.sgd(0.1, momentum=0.9, accumulator_dtype="float32")'
)
TABLE = [
    (
        "self.fc2 = torch.nn.Linear(5, 4)",
        "self.fc2 = torch.nn.Linear(5, 4)\n"
        '        self.register_buffer("table", 1 / (3 + torch.arange(5, dtype=torch.float)), persistent=False)',
    ),
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.fc2(torch.tanh(self.fc1(x)) * self.table)"),
    ("self.fc2(nnx.tanh(self.fc1(x)))", "self.fc2(nnx.tanh(self.fc1(x)) / (3 + np.arange(5.0)))"),
]
PLAIN = [(TABLE[0][0], TABLE[0][1].replace('self.register_buffer("table", ', "self.table = (").replace(", pers", ")#"))]
OWN_CAST = own_optimizers(
    "Adam(parameters, lr=1e-2)", "optax.chain(optax.stateless(lambda u, p: jax.tree.map(cast, u)), optax.adam(1e-2))"
)
CAST = """
import jax
def cast(x): return x.astype("float32").astype(x.dtype)
"""
OFF = [("(3 + np.arange(5.0))", "(3.00000001 + np.arange(5.0))")]


@pytest.fixture
def alone(tmp_path: Path, single: Workers) -> Checked:
    return checker(tmp_path, single, world_size=1)


@pytest.mark.parametrize(
    ("changes", "array"),
    [
        ([MOMENTUM], "jax's trace (port.py:"),
        (TABLE, "torch's table (port.py:"),
        ([*PLAIN, *TABLE[1:]], "torch's table:"),
    ],
    ids=["momentum", "buffer", "attribute"],
)
def test_an_array_in_float32_is_a_remark_if_nothing_differs_with_it_in_float64(
    changes: list[Change], array: str, alone: Checked
) -> None:
    report = alone(*changes)
    assert report.verdict == "equal", report
    (remark,) = [remark for remark in report.idle if "declared in float32" in remark]
    assert remark.startswith(array)
    for result in report.stages.values():
        assert max(result.residuals) <= result.allowed


@pytest.mark.parametrize(
    ("changes", "more"),
    [([*TABLE, *OFF], ""), ([OWN_CAST], CAST)],
    ids=["another table", "a cast of the port's own"],
)
def test_what_it_does_not_explain_stays_a_difference(changes: list[Change], more: str, alone: Checked) -> None:
    report = alone(*changes, more=more)
    assert report.verdict == "different" and not report.idle, report
