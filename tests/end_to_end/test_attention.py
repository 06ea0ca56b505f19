"""Flax's attention computes its softmax in float32, which hides no fault."""

import pytest

from tests.support.checks import Checked
from tests.support.small_port import Change

TORCH = """class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        heads = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

class TorchNet"""
# Attention over the rows of x, (B, 3, 8), then a GELU in front of fc2.
ATTENTION: list[Change] = [
    ("class TorchNet", TORCH),
    ("torch.nn.Linear(3, 5)", "Attention()"),
    ("torch.nn.Linear(5, 4)", "torch.nn.Linear(8, 4)"),
    ("torch.tanh(self.fc1(x))", "F.gelu(self.fc1(x)).mean(1)"),
    ("nnx.Linear(3, 5, rngs=rngs)", "nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)"),
    ("nnx.Linear(5, 4, rngs=rngs)", "nnx.Linear(8, 4, rngs=rngs)"),
    ("(12, 3)", "(12, 3, 8)"),
]


@pytest.mark.large
@pytest.mark.parametrize(("approximate", "names"), [(False, []), (True, [("gelu_approximation",)])])
def test_a_fault_behind_flaxs_attention_is_named(
    approximate: bool, names: list[tuple[str, ...]], checked: Checked
) -> None:
    gelu = ("nnx.tanh(self.fc1(x))", f"nnx.gelu(self.fc1(x), approximate={approximate}).mean(1)")
    report = checked(*ATTENTION, gelu)
    assert report.verdict == ("different" if names else "equal"), report
    assert [found.cause and found.cause.names for found in report.differences] == names
