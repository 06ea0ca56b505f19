"""A user's port in both frameworks: equal if correct, different at the stage of a fault."""

from pathlib import Path

import pytest

from jaxddp.parity.cases import PortCase
from jaxddp.parity.port import PortFile
from tests.support.trajectories import FORCED_STAGES, compare, drawn, run_forced, run_jax

TOLERANCE = 1e-10  # AdamW in float64, 6 steps; measured: 2e-15, and 1e-9 in a bias before BatchNorm
FORCED_TOLERANCE = 1e-12  # measured: 5e-15

PORT = """
import jax, numpy as np, optax, torch
from flax import linen, nnx

class TorchNet(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 4))

class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 5, rngs=rngs)
        self.norm = NORM
        self.outer = nnx.Linear(5, 4, rngs=rngs)
    def __call__(self, x):
        return self.outer(nnx.tanh(self.norm(self.inner(x))))

class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(5, name="inner")(x)
        x = linen.BatchNorm(False, momentum=0.9, epsilon=1e-5, use_fast_variance=False, name="norm")(x)
        return linen.Dense(4, name="outer")(linen.tanh(x))

def torch_model(): return TorchNet()
def flax_model(): return MODEL
def torch_loss(model, batch): return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
def flax_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
def torch_optimizer(parameters): return torch.optim.AdamW(parameters, lr=0.01)
flax_optimizer = OPTIMIZER
def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}
names = {"inner": "0", "norm": "1", "outer": "3"}
accumulation_steps = 2
clip_grad_norm = 0.5
"""
RIGHT = {
    "MODEL": "FlaxNet(nnx.Rngs(0))",
    "NORM": "nnx.BatchNorm(5, momentum=0.9, epsilon=1e-5, use_fast_variance=False, rngs=rngs)",
    "OPTIMIZER": "optax.adamw(0.01, weight_decay=0.01)",
}


def run(folder: Path, pool, **changes: str):
    """Write the port with changes; return its case and torch's run."""
    text = PORT
    for word, code in {**RIGHT, **changes}.items():
        text = text.replace(word, code)
    (folder / "port.py").write_text(text)
    case = PortCase(PortFile(str(folder / "port.py")), world_size=2, steps=6)
    return case, pool.run(case, drawn(case))


def free(folder: Path, pool, **changes: str):
    """Compare runs from the same start, neither forced to the other's state."""
    case, torch_run = run(folder, pool, **changes)
    return compare(run_jax(case, torch_run.start), torch_run, TOLERANCE, STAGES)


STAGES = ("local_loss", "local_gradients", "gradients", "params")  # no buffers: jax's running variance is biased


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["FlaxNet(nnx.Rngs(0))", "LinenNet()"], ids=["nnx", "linen"])
def test_a_correct_port_is_equal(model, tmp_path, pool):
    comparison = free(tmp_path, pool, MODEL=model)
    assert comparison.equal, comparison


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", ["FlaxNet(nnx.Rngs(0))", "LinenNet()"], ids=["nnx", "linen"])
def test_only_flaxs_running_variance_differs_in_forced_steps(model, tmp_path, pool):
    case, torch_run = run(tmp_path, pool, MODEL=model)
    comparison = compare(run_forced(case, torch_run), torch_run, FORCED_TOLERANCE, FORCED_STAGES)
    assert comparison.first is not None
    stage, residual = comparison.first
    assert (stage, residual.step, residual.tensor) == ("buffers", 1, "1.running_var")
    others = [worst.value for stage, worst in comparison.worst.items() if stage != "buffers"]
    assert max(others) < FORCED_TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"OPTIMIZER": "optax.adamw(0.01)"}, "params"),  # decay 1e-4, torch's is 1e-2
        ({"NORM": "nnx.BatchNorm(5, momentum=0.9, epsilon=1e-3, rngs=rngs)"}, "local_loss"),
        (
            {"OPTIMIZER": "optax.chain(optax.scale(0.5), optax.adamw(0.01, weight_decay=0.01))"},
            "params",
        ),  # only eps matters
    ],
    ids=["decay", "epsilon", "scale"],
)
def test_a_faulty_port_differs_in_the_faults_stage(changes, stage, tmp_path, pool):
    comparison = free(tmp_path, pool, **changes)
    assert comparison.first is not None and comparison.first[0] == stage, comparison
    assert comparison.first[1].step == 1
