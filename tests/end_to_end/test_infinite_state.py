"""Infinities that a run may have: a plateau before its first test, and a mask of -inf among its variables."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from jaxddp.train import run
from tests.support.train_runs import saved_steps


class Mask(nnx.Variable[Any]):
    """Variable that does not learn."""


class Attention(nnx.Module):
    def __init__(self) -> None:
        self.q = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.mask = Mask(jnp.where(np.tril(np.ones((6, 6), bool)), 0.0, -jnp.inf))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", self.q(x), x) + self.mask[None])
        return jnp.einsum("bts,bsd->btd", weights, x)


def examples() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(32, 6, 4)).astype(np.float32)}


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["x"]) ** 2).mean((1, 2))


def test_checkpoints_before_the_first_test_hold_a_mask_and_a_plateau(tmp_path: Path) -> None:
    program = SimpleNamespace(train_data=examples, test_data=examples, jax_model=Attention, jax_loss=loss)
    flags: dict[str, Any] = {"global_batch_size": 8, "schedule": "plateau", "platform": "cpu", "steps_per_dispatch": 1}
    whole = run(program, epochs=2, **flags)
    output = str(tmp_path / "run")
    run(program, epochs=1, checkpoint_every="1steps", keep_checkpoints=9, output=output, **flags)
    assert saved_steps(tmp_path / "run") == [1, 2, 3, 4]
    resumed = run(program, resume=output, epochs=2)
    assert np.isneginf(resumed.weights["mask"]).any()
    assert all(np.array_equal(value, whole.weights[name]) for name, value in resumed.weights.items())
    run(program, epochs=0, weights=f"{output}/model.safetensors", **flags)
