"""A recurrent cell with one bias, where torch's has two: compared by their sum, which moves by two updates in torch."""

from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.port.names_block import with_names
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers
from tests.support.small_port import BY_NORM, STEP, Change, replaced, step

LSTM = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 5)
    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])

def torch_model():
    return TorchNet()

def torch_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05)

def jax_model():
    from flax import nnx
    class FlaxNet(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=rngs))
            self.out = nnx.Linear(4, 5, rngs=rngs)
        def __call__(self, x):
            return self.out(self.rnn(x)[:, -1])
    return FlaxNet(nnx.Rngs(0))

def jax_loss(model, batch):
    from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
    return cross_entropy(model(batch["x"]), batch["y"]).mean()

import optax
jax_optimizer = optax.adamw(1e-2, weight_decay=0.05)

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(size=(6, 3, 3)), "y": rng.integers(0, 5, 6)}
"""
TABLE = {
    "rnn.cell.dense_i.kernel": "rnn.weight_ih_l0",
    "rnn.cell.dense_h.kernel": "rnn.weight_hh_l0",
    "rnn.cell.dense_h.bias": 'summed("rnn.bias_ih_l0", "rnn.bias_hh_l0")',
}
PORT = with_names(LSTM, TABLE)
# A GRU of plain functions, with the biases of Equinox's: the state's candidate has its own.
GRU = """
def jax_model():
    shapes = {"w_x": (3, 12), "w_h": (4, 12), "b": (12,), "b_n": (4,)}
    cell = {name: np.zeros(shape) for name, shape in shapes.items()}
    return {"rnn": cell, "out": {"kernel": np.zeros((4, 5)), "bias": np.zeros(5)}}

def jax_loss(model, batch):
    import jax
    from jax import numpy as jnp
    cell, h = model["rnn"], jnp.zeros((6, 4), batch["x"].dtype)
    for x in batch["x"].swapaxes(0, 1):
        r, z, n = jnp.split(x @ cell["w_x"] + cell["b"], 3, axis=-1)
        to_r, to_z, to_n = jnp.split(h @ cell["w_h"], 3, axis=-1)
        r, z = jax.nn.sigmoid(r + to_r), jax.nn.sigmoid(z + to_z)
        h = (1 - z) * jnp.tanh(n + r * (to_n + cell["b_n"])) + z * h
    logits = h @ model["out"]["kernel"] + model["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
"""
TABLE_OF_GRU = {
    "rnn.w_x": "rnn.weight_ih_l0",
    "rnn.w_h": "rnn.weight_hh_l0",
    "rnn.b": 'summed("rnn.bias_ih_l0", part("rnn.bias_hh_l0", 0, of=(8, 4)))',
    "rnn.b_n": 'part("rnn.bias_hh_l0", 1, of=(8, 4))',
}
SUM = ("sum_moved_once",)
OPTAX = "optax.adamw(1e-2, weight_decay=0.05)"
OUT = "self.out = nn.Linear"
FROZEN = (OUT, f"nn.init.zeros_(self.rnn.bias_hh_l0).requires_grad_(False)\n        {OUT}")
OWN_STEP = step((BY_NORM, "share = 1"), ("clip_grad_norm = 0.05\n", ""))
# Torch moves the sum by two updates, and so does this port.
TWICE = (
    ("torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05)", "torch.optim.SGD(parameters, lr=0.1)"),
    (
        OPTAX,
        """optax.multi_transform(
    {"once": optax.sgd(0.1), "twice": optax.sgd(0.2)},
    lambda params: __import__("jax").tree_util.tree_map_with_path(
        lambda path, x: "twice" if x.shape == (16,) else "once", params
    ),
)""",
    ),
)
CLIPS = "clip_grad_norm = 0.05\n"
GATES = (
    "        def __call__(self, x):\n            return self.out(self.rnn(x)[:, -1])",
    """        def __call__(self, x):
            import jax
            from jax import numpy as jnp
            cell = self.rnn.cell
            h = c = jnp.zeros((6, 4), x.dtype)
            for t in range(3):
                i, g, f, o = jnp.split(cell.dense_i(x[:, t]) + cell.dense_h(h), 4, axis=-1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return self.out(h)""",
)
COUNTED_TWICE = (
    GATES[0],
    GATES[1].replace("i, g, f, o", "i, f, g, o").replace("(h),", "(h) + cell.dense_h.bias[...],"),
)
FACTOR = ('batch["y"]).mean()', 'batch["y"]).mean() * 1.5')
BETA = (OPTAX, "optax.adamw(1e-2, b2=0.99, weight_decay=0.05)")
# Changes of the port, more of it; of each difference the stage, the tensor, and the names of its cause, () for none.
SUM_ALONE = [("update", "rnn.bias_ih_l0", SUM)]
FAULTS: dict[str, tuple[list[Change], str, list[tuple[str, str, tuple[str, ...]]]]] = {
    "own step": ([], OWN_STEP, SUM_ALONE),
    "own step, clipped": ([], STEP, SUM_ALONE),
    "clipped": ([], CLIPS, SUM_ALONE),
    "momentum and L2": (
        [
            (
                "AdamW(parameters, lr=1e-2, weight_decay=0.05)",
                "SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)",
            ),
            (OPTAX, "optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))"),
        ],
        "",
        SUM_ALONE,
    ),
    "beta2": ([BETA], "", [("update", "rnn.bias_ih_l0", ("betas",)), *SUM_ALONE]),
    "factor": ([FACTOR], "", [("local_loss", "loss", ("loss_scale",)), *SUM_ALONE]),
    "gates": ([GATES], "", [("local_loss", "loss", ("other_order",)), *SUM_ALONE]),
    "counted twice": ([COUNTED_TWICE], "", [("local_loss", "loss", ("call_added",)), *SUM_ALONE]),
}
SLOW = {"gates", "counted twice", "momentum and L2"}


def checked(folder: Path, workers: Workers, text: str, quick: bool = True) -> Report:
    (folder / "port.py").write_text(text)
    return check(folder / "port.py", world_size=2, steps=3, workers=workers, numerics=False, quick=quick)


def differences(report: Report) -> list[tuple[str, str, tuple[str, ...]]]:
    assert not report.problems, str(report)
    return [(one.stage, one.tensor, one.cause.names if one.cause else ()) for one in report.differences]


def test_a_cell_with_one_bias_is_equal_but_for_an_update(tmp_path: Path, workers: Workers) -> None:
    report = checked(tmp_path, workers, LSTM)
    assert report.names == TABLE, str(report)
    report = checked(tmp_path, workers, with_names(LSTM, report.names))
    assert differences(report) == SUM_ALONE, str(report)
    (cause,) = (one.cause for one in report.differences)
    assert cause is not None
    assert sentences(cause) == ("torch moves rnn.bias_ih_l0, rnn.bias_hh_l0 by an update each, jax their sum by one",)
    assert {stage for stage, result in report.stages.items() if result.exceeds} == {"update"}


EQUAL: dict[str, tuple[tuple[Change, ...], str]] = {
    "one is trained": ((FROZEN,), ""),
    "one is trained, clipped": ((FROZEN,), CLIPS),
    "one is trained, own step": ((FROZEN,), STEP),
    "both updates are made": (TWICE, ""),
    "both updates are made, own step": (TWICE, OWN_STEP),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("changes", "more"), EQUAL.values(), ids=EQUAL)
def test_a_port_that_moves_the_sum_as_torch_does_is_equal(
    changes: tuple[Change, ...], more: str, tmp_path: Path, workers: Workers
) -> None:
    report = checked(tmp_path, workers, replaced(PORT, *changes) + more, quick=False)
    assert report.verdict == "equal" and not report.idle, str(report)


@pytest.mark.parametrize("fault", [pytest.param(x, marks=[pytest.mark.large] * (x in SLOW)) for x in FAULTS])
def test_a_fault_beside_the_sum_is_found(fault: str, tmp_path: Path, workers: Workers) -> None:
    changes, more, expected = FAULTS[fault]
    report = checked(tmp_path, workers, replaced(PORT, *changes) + more)
    assert differences(report) == expected, str(report)
    assert (more in (CLIPS, STEP)) == (
        "and clips by a norm that counts each" in str(report).replace("\n         ", " ")
    )


def test_a_gru_adds_two_thirds_of_its_biases(tmp_path: Path, workers: Workers) -> None:
    text = replaced(LSTM, ("nn.LSTM", "nn.GRU")) + GRU
    report = checked(tmp_path, workers, text)
    assert report.names == TABLE_OF_GRU, str(report)
    report = checked(tmp_path, workers, with_names(text, report.names))
    assert differences(report) == SUM_ALONE, str(report)


@pytest.mark.large
def test_a_fault_in_a_gru_beside_the_sum_is_found(tmp_path: Path, workers: Workers) -> None:
    text = replaced(LSTM + GRU, ("nn.LSTM", "nn.GRU"), ("(1 - z) * jnp", "z * jnp"), ("+ z * h", "+ (1 - z) * h"))
    report = checked(tmp_path, workers, with_names(text, TABLE_OF_GRU))
    assert [one.stage for one in report.differences] == ["local_loss", "update"], str(report)
    assert differences(report)[1:] == SUM_ALONE, str(report)


def test_a_frozen_summand_comes_last(tmp_path: Path, workers: Workers) -> None:
    frozen = (FROZEN[0], FROZEN[1].replace("bias_hh", "bias_ih"))
    report = checked(tmp_path, workers, replaced(PORT, frozen))
    (problem,) = report.problems
    assert problem.message == "names: rnn.cell.dense_h.bias: rnn.bias_ih_l0 is frozen; name rnn.bias_hh_l0 first"
    report = checked(tmp_path, workers, replaced(LSTM, frozen))
    assert report.names == TABLE | {"rnn.cell.dense_h.bias": 'summed("rnn.bias_hh_l0", "rnn.bias_ih_l0")'}, str(report)
