"""States to save, and files of checkpoints."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from optax import GradientTransformation as Optimizer

from jaxddp import models, optim
from jaxddp.checkpoint import Checkpoints
from jaxddp.data.torch_rng import Generator
from jaxddp.nn.functional import Functional
from jaxddp.state import TrainState

RUN = "run"


def char_mlp(hidden_size: int = 4) -> nnx.Module:
    return models.CharMLP(5, 2, 3, hidden_size, generator=Generator(0))


def state_of(step: int, optimizer: Optimizer | None = None, model: nnx.Module | None = None) -> TrainState:
    """A state in the middle of a run, in which no array has its initial value."""
    functional = Functional(model or char_mlp())
    opt_state = (optimizer or optim.adam()).init(functional.params)
    rng = np.random.default_rng(step)

    def changed(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return (leaf + rng.normal(size=leaf.shape) * 100).astype(leaf.dtype)

    params, buffers, opt_state = jax.tree.map(changed, (functional.params, functional.buffers, opt_state))
    return TrainState(np.int32(step), params, buffers, opt_state)


def save_all(checkpoints: Checkpoints, *steps: int) -> None:
    """Save the states of these steps, and wait until they are written."""
    for step in steps:
        checkpoints.save(state_of(step))
    checkpoints.wait()


def check_same(restored: TrainState, expected: TrainState) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for (path, value), other in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(restored), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert value.dtype == other.dtype, name
        np.testing.assert_array_equal(other, value, name)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
