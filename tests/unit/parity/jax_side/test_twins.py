"""Tables of names that are proposed before anything runs, and what they are proposed by."""

from pathlib import Path
from typing import Any

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.jax_side.twins import FindCrossedNames, FindTwins, FoundTwins
from jaxddp.parity.port import PortFile
from tests.support.arranged_ports import CONVNET, JOINT, SPLIT, TANH, attention, write
from tests.support.small_port import Change

COMPACT: list[Change] = [
    ("from flax import nnx\n", "from flax import linen\n"),
    ("class FlaxNet(nnx.Module):\n        def __init__(self, rngs):\n", "class FlaxNet(linen.Module):\n"),
    ('            self.conv = nnx.Conv(2, 3, (3, 3), padding="VALID", rngs=rngs)\n', ""),
    ("            self.fc1 = nnx.Linear(18, 6, rngs=rngs)\n            self.fc2 = nnx.Linear(6, 4, rngs=rngs)\n", ""),
    ("        def __call__", "        @linen.compact\n        def __call__"),
    ("nnx.relu(self.conv(", 'linen.relu(linen.Conv(3, (3, 3), padding="VALID")('),
    ("return self.fc2(jax", "y = linen.Dense(6)(x.reshape(len(x), -1)); return linen.Dense(4)(jax"),
    ("self.fc1(x.reshape(len(x), -1))", "y"),
    ("FlaxNet(nnx.Rngs(0))", "FlaxNet()"),
]
# A norm of the flattened image, in front of fc1.
NORM: list[Change] = [
    (
        "        self.fc1 = torch.nn.Linear(18, 6)",
        "        self.bn = torch.nn.BatchNorm1d(18)\n        self.fc1 = torch.nn.Linear(18, 6)",
    ),
    ("self.fc1(torch.relu(self.conv(x)).flatten(1))", "self.fc1(self.bn(torch.relu(self.conv(x)).flatten(1)))"),
    ("            self.fc1 = nnx", "            self.bn = BatchNorm(18)\n            self.fc1 = nnx"),
    ("    from flax import nnx\n", "    from flax import nnx\n    from jaxddp.nn.layers import BatchNorm\n"),
    ("self.fc1(x.reshape(len(x), -1))", "self.fc1(self.bn(x.reshape(len(x), -1)))"),
]
AS_TORCH: Change = ("x.reshape(len(x), -1)", "x.transpose(0, 3, 1, 2).reshape(len(x), -1)")
BIG: Change = ("x = nnx.relu(self.conv(", "x = 3 + nnx.relu(self.conv(")  # a fault that drowns everything behind it


def found_in(path: Path) -> FoundTwins:
    return FindTwins(PortCase(PortFile(str(path)), 1)).run(lambda where: None)


def proposed(folder: Path, text: str, *changes: Change) -> tuple[str, dict[str, str]]:
    found = found_in(write(folder, text, *changes))
    return found.without_twin, found.names


FLATTENED = 'flattened("fc1", (3, 2, 3))'


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [TANH],
        [("flatten(1)", "reshape(len(x), -1)")],
        [("relu(self.conv(x))", "relu(self.conv(x) + 0.01)")],
    ],
    ids=["right", "GELU", "reshape", "an earlier fault"],
)
def test_the_order_of_a_flattened_image_is_proposed(changes: list[Change], tmp_path: Path) -> None:
    assert proposed(tmp_path, CONVNET, *changes) == ("", {"fc1": FLATTENED})


def test_a_norm_of_the_flattened_image_is_proposed_too(tmp_path: Path) -> None:
    rule = 'flattened("bn", (3, 2, 3))'
    assert proposed(tmp_path, CONVNET, *NORM) == ("", {"bn": rule, "fc1": FLATTENED})


def test_the_order_is_proposed_with_names_that_do_not_map(tmp_path: Path) -> None:
    found = proposed(tmp_path, CONVNET, *COMPACT)
    assert found[0].startswith("names: jax's Conv_0.kernel (3, 3, 2, 3) has no twin")
    assert found[1] == {"Conv_0": "conv", "Dense_0": FLATTENED, "Dense_1": "fc2"}


@pytest.mark.parametrize(
    "changes",
    [
        [AS_TORCH],
        [("x.reshape(len(x), -1)", "x.transpose(0, 2, 1, 3).reshape(len(x), -1)")],
        [("x.reshape(len(x), -1)", "x[::-1].reshape(len(x), -1)")],
        [BIG],
    ],
    ids=["torch's order", "a third order", "other examples", "a large fault"],
)
def test_no_order_is_proposed_that_does_not_bring_the_layers_near(changes: list[Change], tmp_path: Path) -> None:
    assert proposed(tmp_path, CONVNET, *changes) == ("", {})


@pytest.mark.one_in(4, first=1)
@pytest.mark.parametrize(
    ("text", "names"),
    [
        (attention(SPLIT), {name: f'part("qkv", {n}, of=3)' for n, name in enumerate("qkv")}),
        (attention(JOINT), {"qkv": 'fused("q", "k", "v")'}),
    ],
    ids=["split", "joint"],
)
def test_the_order_of_fused_layers_is_proposed_only_if_a_pass_decides(
    text: str, names: dict[str, str], tmp_path: Path
) -> None:
    found = proposed(tmp_path, text)
    assert found[1] == names
    other = ("q, k, v = (y.reshape(", "q, k, v = (y[::-1].reshape(")  # attention to other examples: all are far
    layers = ", ".join(sorted(names))
    why = f"{found[0]}; ambiguous: {layers} may be in several places in torch, and "
    assert proposed(tmp_path, text, other) == (f"{why}no run of both models is clearly nearer in one of them", {})
    raising = ("def torch_loss(model, batch):", "def torch_loss(model, batch):\n    raise ValueError")
    path = write(tmp_path, text)
    path.write_text(path.read_text().replace(*raising))
    failing = found_in(path)
    assert (failing.without_twin, failing.names) == (f"{why}the loss cannot be run", {})


def test_parts_that_nothing_tells_apart_are_ambiguous(tmp_path: Path) -> None:
    """With one key, softmax is 1: queries and keys are of no effect."""
    says, names = proposed(tmp_path, attention(SPLIT), ("T, C = 8, 2, 5, 4", "T, C = 8, 2, 1, 4"))
    assert names == {"v": 'part("qkv", 2, of=3)'} and "ambiguous: k, q may be in several places" in says


def parallel(jax: str, torch: str, called: str) -> str:
    """Return an attention with these layers for q, k and v, which torch calls in another order."""
    of_torch, of_jax = ([f"self.{name}" for name in names.split()] for names in (torch, jax))
    return attention(
        {
            "TORCH_LAYERS": f"{', '.join(of_torch)} = (torch.nn.Linear(E, E) for _ in range(3))",
            "TORCH_CALL": f"[{{n: f(x).view(len(x), T, H, -1) for n, f in {called}}}[n] for n in range(3)]".replace(
                "LAYERS", f"enumerate(({', '.join(of_torch)}))"
            ),
            "FLAX_LAYERS": f"{', '.join(of_jax)} = (nnx.Linear(E, E, rngs=rngs) for _ in range(3))",
            "FLAX_CALL": f"(f(x) for f in ({', '.join(of_jax)}))",
        }
    )


VALUE_FIRST = "sorted(LAYERS, key=lambda pair: -pair[0])"
KEY_FIRST = "sorted(LAYERS, key=lambda pair: (pair[0] + 2) % 3)"
FAR: Change = ("q, k, v = (y.reshape(", "q, k, v = (9 - 5 * y[::-1].reshape(")
DROPPED: list[Change] = [
    ("return self.head(F.gelu(self.out(y)))", "return self.head(F.gelu(self.out(F.dropout(y))))"),
    (
        "return self.head(jax.nn.gelu(self.out(y)",
        "y = nnx.Dropout(0.5, rngs=nnx.Rngs(0))(y); return self.head(jax.nn.gelu(self.out(y)",
    ),
]


@pytest.mark.parametrize("called", [VALUE_FIRST, KEY_FIRST])
@pytest.mark.parametrize("changes", [[], [FAR], DROPPED], ids=["right", "far", "dropout"])
def test_query_key_and_value_pair_off_by_name(changes: list[Change], called: str, tmp_path: Path) -> None:
    text = parallel("query key value", "q_proj k_proj v_proj", called)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    assert proposed(tmp_path, text, *changes)[1] == names


@pytest.mark.parametrize("called", [VALUE_FIRST, KEY_FIRST])
@pytest.mark.parametrize("changes", [[], [TANH], DROPPED], ids=["right", "GELU", "dropout"])
def test_a_pass_pairs_layers_that_are_called_in_another_order(
    changes: list[Change], called: str, tmp_path: Path
) -> None:
    found = proposed(tmp_path, parallel("a b c", "x y z", called), *changes)
    assert "ambiguous" not in found[0] and found[1] == {"a": "x", "b": "y", "c": "z"}


@pytest.mark.parametrize("called", [VALUE_FIRST, KEY_FIRST])
def test_layers_whose_sum_alone_counts_are_interchangeable(called: str, tmp_path: Path) -> None:
    """Two tables are right; the first order of use, which is wrong, is not kept because of that."""
    sums: list[Change] = [
        ("attention(q, k, v)", "attention(q + k, q + k, v)"),
        ('bkhd->bhqk", q, k', 'bkhd->bhqk", q + k, q + k'),
    ]
    says, names = proposed(tmp_path, parallel("a b c", "x y z", called), *sums)
    assert "ambiguous" not in says and names["c"] == "z" and {*names.values()} == {"x", "y", "z"}


def test_layers_that_nothing_tells_apart_are_ambiguous_and_left_out(tmp_path: Path) -> None:
    says, names = proposed(tmp_path, parallel("a b c", "x y z", VALUE_FIRST), FAR)
    assert names == {} and "; ambiguous: " in says and "may be in several places" in says


def test_a_table_that_crosses_two_layers_is_suspected(tmp_path: Path) -> None:
    path = write(tmp_path, parallel("a b c", "x y z", VALUE_FIRST))
    path.write_text(path.read_text() + 'names = {"a": "x", "b": "z", "c": "y"}')
    names, says = FindCrossedNames(PortCase(PortFile(str(path)), 1)).run(lambda where: None)
    assert (names, says) == (
        {"a": "x", "b": "y", "c": "z"},
        "perhaps `names` crosses b and c: with the two swapped out agrees",
    )


def test_parts_in_another_order_are_found(tmp_path: Path) -> None:
    found = proposed(tmp_path, attention(SPLIT), ("q, k, v = (y.transpose", "v, q, k = (y.transpose"))
    assert found[1] == {name: f'part("qkv", {n}, of=3)' for name, n in (("q", 1), ("k", 2), ("v", 0))}


DRAWS: Change = (
    "return linen.Dense(4)(jax",
    "import jax; jax.random.normal(jax.random.key(0), (4, 2)); return linen.Dense(4)(jax",
)


@pytest.mark.parametrize(("changes", "shapes"), [([], []), ([DRAWS], [(4, 2)])], ids=["no draw", "a draw"])
def test_draws_are_told_beside_names_that_do_not_map(changes: list[Change], shapes: list[Any], tmp_path: Path) -> None:
    """Without them the check would say that jax's loss draws nothing, or fails."""
    found = found_in(write(tmp_path, CONVNET, *COMPACT, *changes))
    assert found.without_twin and not isinstance(found.draws, str)
    assert [draw.shape for draw in found.draws] == shapes


# A mask as nanoGPT keeps one, beside layers that are called otherwise; and a dropout.
MASK: list[Change] = [
    *COMPACT,
    (
        "        self.fc1 = torch.nn.Linear(18, 6)",
        '        self.register_buffer("mask", torch.ones(2))\n        self.fc1 = torch.nn.Linear(18, 6)',
    ),
]
COUNTS: Change = ("torch.relu(self.conv(x))", "torch.relu(self.conv(x) + 0 * self.mask.add_(1).sum())")


TABLE = {"Conv_0": "conv", "Dense_0": FLATTENED, "Dense_1": "fc2"}


@pytest.mark.parametrize(
    ("changes", "no_twin", "names"),
    [(MASK, ("mask",), TABLE), ([MASK[-1], AS_TORCH], ("mask",), {}), ([*MASK, COUNTS], (), {"Conv_0", *TABLE})],
    ids=["beside names", "alone", "changed by the loss"],
)
def test_constants_of_torch_are_proposed(
    changes: list[Change], no_twin: tuple[str, ...], names: Any, tmp_path: Path
) -> None:
    found = found_in(write(tmp_path, CONVNET, *changes))
    assert "torch's mask (2,) has no twin in jax" in found.without_twin and found.no_twin == no_twin
    assert found.names == names if isinstance(names, dict) else found.names.keys() == names


UNTRACKED: Change = ("BatchNorm1d(18)", "BatchNorm1d(18, track_running_stats=False)")
NO_STATISTICS: Change = ("self.bn = BatchNorm(18)", "self.bn = nnx.LayerNorm(18, rngs=rngs)")


@pytest.mark.parametrize(
    ("change", "no_twin"),
    [
        (UNTRACKED, ("bn.mean", "bn.num_batches_tracked", "bn.var")),
        (NO_STATISTICS, ("bn.running_mean", "bn.running_var")),
    ],
    ids=["jax alone", "torch alone"],
)
def test_statistics_of_one_side_are_proposed_as_no_twin(
    change: Change, no_twin: tuple[str, ...], tmp_path: Path
) -> None:
    assert found_in(write(tmp_path, CONVNET, *NORM, change)).no_twin == no_twin


def test_a_bias_of_one_side_leaves_the_other_arrays_their_lines(tmp_path: Path) -> None:
    found = found_in(write(tmp_path, CONVNET, *COMPACT, ("linen.Dense(6)(", "linen.Dense(6, use_bias=False)(")))
    assert (found.names, found.no_twin) == ({"Conv_0": "conv", "Dense_0": "fc1", "Dense_1": "fc2"}, ())
    assert found.without_twin.endswith("give jax's Dense_0 a bias (use_bias=True), or torch's fc1 none (bias=False)")


# Hugging Face's GPT-2: Conv1D (in, out) beside a kernel of (out, in), as in FlaxGPT2, in a square layer.
SQUARE = """
import numpy as np
import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_proj, self.head = Conv1D(4, 4), torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.c_proj(x)))

def jax_model():
    from flax import linen
    class Kernel(linen.Module):
        @linen.compact
        def __call__(self, x):
            kernel = self.param("kernel", linen.initializers.normal(), (4, 4))
            return x @ kernel.T + self.param("bias", linen.initializers.zeros, (4,))[None]
    class FlaxNet(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="head")(linen.tanh(Kernel(name="c_proj")(x)))
    return FlaxNet()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (6, 4)), "y": rng.integers(0, 3, 6)}
"""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], {"c_proj": 'transposed("c_proj", (1, 0))'}),
        ([("kernel.T", "kernel")], {}),
        ([("Conv1D(4, 4)", "torch.nn.Linear(4, 4)"), ("kernel.T", "kernel")], {}),
        ([("kernel.T", "kernel[::-1]")], {}),
    ],
    ids=["out, in", "in, out", "Linear", "neither"],
)
def test_the_order_of_a_square_kernels_axes_is_proposed_where_a_pass_decides(
    changes: list[Change], names: dict[str, str], tmp_path: Path
) -> None:
    assert proposed(tmp_path, SQUARE, *changes) == ("", names)
