"""Learning rates with which N replicas equal one device, in both frameworks.

Replicas average their gradients. If the loss is a mean over the batch, the average is the gradient of the mean over
the whole batch, and the rate stays. If the loss is a sum, the average is 1/N of the gradient of the whole sum, and
SGD needs N times the rate; an optimizer that divides the gradient by its own size does not.
"""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.residuals import residuals
from jaxddp.parity.port import PortFile
from jaxddp.parity.torch_side.pool import TorchPool
from tests.support.small_port import own_optimizers, write
from tests.support.trajectories import drawn, run_jax

WORLD_SIZE = 4
EQUAL = 1e-12  # of the parameters' change, float64; measured: up to 4e-15
NEARLY_EQUAL = 1e-9  # Adam on sums, whose eps of 1e-12 does not scale with the sum; measured: 4.8e-12
DIFFERENT = 0.1  # measured: from 0.5

SUM = [('["y"])\n\ndef flax', '["y"], reduction="sum")\n\ndef flax'), ('batch["y"]).mean()', 'batch["y"]).sum()')]
WHOLE_BATCH = (
    "def batch(step, rank):\n",
    f"def batch(step, rank):\n    parts = [part(step, r) for r in range({WORLD_SIZE})]\n"
    "    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}\n\ndef part(step, rank):\n",
)
OPTIMIZERS = {
    "sgd": ("SGD(parameters, lr={})", "optax.sgd({})"),
    "adam": ("Adam(parameters, lr={}, eps=1e-12)", "optax.adam({}, eps=1e-12)"),
}


def run(folder: Path, pool: TorchPool, framework: str, optimizer: str, lr: float, world_size: int, sums: bool):
    changes = [own_optimizers(*(text.format(lr) for text in OPTIMIZERS[optimizer])), *(SUM if sums else [])]
    folder = Path(tempfile.mkdtemp(dir=folder))  # compiled programs are cached by the port's path
    path = write(folder, *changes, *([] if world_size > 1 else [WHOLE_BATCH]))
    case = PortCase(PortFile(str(path)), world_size, steps=5)
    weights = drawn(case)
    return run_jax(case, weights) if framework == "jax" else pool.run(case, weights)


def distance(one: Trajectory, other: Trajectory) -> float:
    ours, theirs = one.records[-1]["params"], other.records[-1]["params"]
    return max(residuals(ours, theirs, other.start).values())


@pytest.mark.one_in(8, first=2)
@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize(
    ("optimizer", "sums", "right", "wrong"),
    [("sgd", False, 1, WORLD_SIZE), ("sgd", True, WORLD_SIZE, 1), ("adam", False, 1, 2), ("adam", True, 1, WORLD_SIZE)],
    ids=["sgd mean", "sgd sum", "adam mean", "adam sum"],
)
def test_replicas_equal_one_device_at_the_right_rate_only(
    framework: str, optimizer: str, sums: bool, right: float, wrong: float, tmp_path: Path, pool: TorchPool
) -> None:
    lr = 0.01
    one = run(tmp_path, pool, framework, optimizer, lr, 1, sums)
    allowed = NEARLY_EQUAL if optimizer == "adam" and sums else EQUAL
    equal = distance(run(tmp_path, pool, framework, optimizer, right * lr, WORLD_SIZE, sums), one)
    different = distance(run(tmp_path, pool, framework, optimizer, wrong * lr, WORLD_SIZE, sums), one)
    assert equal < allowed
    assert different > DIFFERENT
    assert np.isfinite(equal)
