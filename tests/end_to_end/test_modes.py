"""Checks of ports with layers in evaluation mode: each module keeps the mode that its side sets."""

import pytest

from jaxddp.parity.report.sentences import sentences
from tests.support.checks import Checked
from tests.support.small_port import Change

# BatchNorm, dropout at 0.5, which is to be in eval(), and dropout at 0, which is a mask of ones in jax.
LAYERS: list[Change] = [
    (
        "torch.nn.Linear(5, 4)",
        "torch.nn.Linear(5, 4)\n        self.bn, self.bn2 = torch.nn.BatchNorm1d(5), torch.nn.BatchNorm1d(4)\n"
        "        self.drop, self.none = torch.nn.Dropout(0.5).eval(), torch.nn.Dropout(0.0)",
    ),
    ("self.fc2(torch.tanh(self.fc1(x)))", "self.bn2(self.none(self.fc2(self.drop(self.bn(torch.tanh(self.fc1(x)))))))"),
    (
        "    from flax import nnx\n",
        "    import jax\n    from flax import nnx\n    from jaxddp.nn.layers import BatchNorm\n",
    ),
    (
        "nnx.Linear(5, 4, rngs=rngs)",
        "nnx.Linear(5, 4, rngs=rngs)\n            self.bn, self.bn2 = BatchNorm(5), BatchNorm(4)\n"
        "            self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)",
    ),
    (
        "self.fc2(nnx.tanh(self.fc1(x)))",
        "self.bn2(jax.random.bernoulli(jax.random.key(0), 1.0, (len(x), 4)) * "
        "self.fc2(self.drop(self.bn(nnx.tanh(self.fc1(x))))))",
    ),
]
TORCH_FROZEN: Change = ("    return TorchNet()", "    net = TorchNet()\n    net.bn.eval()\n    return net")
JAX_FROZEN: Change = (
    "    return FlaxNet(nnx.Rngs(0))",
    "    net = FlaxNet(nnx.Rngs(0))\n    net.bn.eval()\n    return net",
)


def test_layers_in_eval_on_both_sides_and_dropout_of_rate_zero_are_equal(checked: Checked) -> None:
    report = checked(*LAYERS, TORCH_FROZEN, JAX_FROZEN, numerics=True)
    assert report.verdict == "equal", str(report)
    assert "buffers" in report.stages  # of bn2, which trains


@pytest.mark.large
@pytest.mark.parametrize(
    ("frozen", "says"),
    [
        (TORCH_FROZEN, "BatchNorm by the batch's statistics, as in training"),
        (JAX_FROZEN, "BatchNorm by its running statistics, as in evaluation, and leaves them as they are"),
    ],
    ids=["torch", "jax"],
)
def test_a_batch_norm_that_is_frozen_on_one_side_only_is_named(frozen: Change, says: str, checked: Checked) -> None:
    first = checked(*LAYERS, frozen).differences[0]
    assert first.cause is not None
    assert (first.cause.names, sentences(first.cause)) == (("batch_norm_eval",), (says,))
