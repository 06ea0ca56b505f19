"""A mask that is the same in all steps is named, though the check hands both sides the same numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.workers import Workers

COMMON = """
import numpy as np
import torch
import jax
import optax
from jax import numpy as jnp

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(5, 5))
    def forward(self, x):
        x = torch.nn.functional.dropout(x, 0.25)
        return torch.nn.functional.dropout(x @ self.mix, 0.25)

def torch_model():
    return Noisy()

def torch_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().mean()

def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(size=(8, 5)), "y": rng.normal(size=(8, 5))}

torch_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
jax_optimizer = optax.sgd(0.1)

def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)
"""
# Two draws whose keys are `one` and `two`, in a loss on a dictionary of arrays.
PLAIN = """
def jax_model():
    return {{"mix": np.zeros((5, 5))}}
{before}
def jax_loss(params, batch{asks}):
    one, two = {keys}
    y = dropped(two, dropped(one, batch["x"]) @ params["mix"])
    return jnp.abs(y - batch["y"]).mean()
"""
STATE = """
def jax_model():
    return {{"mix": np.zeros((5, 5))}}, {{"step": np.zeros((), np.int32)}}

def jax_loss(params, state, batch):
    one, two = jax.random.split(jax.random.fold_in(jax.random.key(1), {number}))
    y = dropped(two, dropped(one, batch["x"]) @ params["mix"])
    return jnp.abs(y - batch["y"]).mean(), {{"step": state["step"] + 1}}
"""
LINEN = """
from flax import linen
class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        drop = linen.Dropout(0.25, deterministic=False)
        return drop(drop(x) @ self.param("mix", linen.initializers.normal(), (5, 5)))

def jax_model():
    return Net()

def jax_loss(model, batch, key):
    return jnp.abs(model(batch["x"], rngs={"dropout": key}) - batch["y"]).mean()
"""
NNX = """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Param(jnp.zeros((5, 5)))
        self.first, self.last = nnx.Dropout(0.25, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)
    def __call__(self, x):
        return self.last(self.first(x) @ self.mix[...])

def jax_model():
    return Net(nnx.Rngs(0))

def jax_loss(model, batch):
    return jnp.abs(model(batch["x"]) - batch["y"]).mean()
"""


def plain(keys: str, asks: str = "", before: str = "") -> str:
    return PLAIN.format(keys=keys, asks=asks, before=before)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2, "cpu") as workers:
        yield workers


def remarks(folder: Path, workers: Workers, half: str, more: str = "") -> list[str]:
    (folder / "port.py").write_text(COMMON + half + more)
    report = check(folder / "port.py", steps=3, workers=workers, numerics=False, causes=False)
    assert report.verdict == "equal", str(report)
    assert not [idle for idle in report.idle if "were not compared" in idle]
    return [idle for idle in report.idle if "key" in idle]


CONSTANT = "one mask for all steps and replicas; give the loss a `key`."


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "half",
    [
        plain("jax.random.split(jax.random.key(3))"),
        plain("KEYS[0], KEYS[1]", before="KEYS = jax.random.split(jax.random.PRNGKey(3))\n"),
    ],
    ids=["made in the loss", "split once outside"],
)
def test_a_constant_key_is_named_at_its_line(half: str, tmp_path: Path, workers: Workers) -> None:
    (remark,) = remarks(tmp_path, workers, half)  # on both draws of its line
    assert remark.startswith("jax draws a bernoulli (8, 5) at port.py:")
    assert remark.endswith(f"from a constant key: {CONSTANT}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("half", "says"),
    [
        (STATE.format(number='state["step"] // 2'), "from the same key in steps 1 and 2: one mask for both"),
        (plain("key, key", asks=", key"), "from the key of an earlier draw at port.py:"),
        (plain("jax.random.split(jax.random.key(0))", asks=", key"), "draw from the `key` that the loss is given"),
    ],
    ids=["every second step", "one key for two draws", "a key that is not used"],
)
def test_keys_that_come_again_are_named(half: str, says: str, tmp_path: Path, workers: Workers) -> None:
    found = remarks(tmp_path, workers, half)
    assert found and all(says in remark for remark in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "half",
    [
        plain("jax.random.split(key)", asks=", key"),
        STATE.format(number='state["step"]'),
        LINEN,
        NNX,
    ],
    ids=["key", "state", "linen", "nnx"],
)
def test_keys_that_differ_like_torchs_draws_have_no_remark(half: str, tmp_path: Path, workers: Workers) -> None:
    assert remarks(tmp_path, workers, half) == []


def test_micro_batches_have_keys_of_their_own(tmp_path: Path, workers: Workers) -> None:
    more = "accumulation_steps = 2\n"
    assert remarks(tmp_path, workers, plain("jax.random.split(key)", asks=", key"), more) == []


def test_a_mask_that_torch_repeats_too_is_right(tmp_path: Path, workers: Workers) -> None:
    seeded = """
def torch_loss(model, batch):
    torch.manual_seed(0)
    return (model(batch["x"]) - batch["y"]).abs().mean()
"""
    assert remarks(tmp_path, workers, plain("jax.random.split(jax.random.key(3))"), seeded) == []


def test_an_entry_called_valid_is_the_ports(tmp_path: Path, workers: Workers) -> None:
    masked = """
def batch(step, rank):
    rng = np.random.default_rng((step, rank))
    return {"x": rng.normal(size=(8, 5)), "y": rng.normal(size=(8, 5)), "valid": rng.integers(0, 2, (8, 5)) > 0}
"""
    half = plain("jax.random.split(key)", asks=", key").replace(
        'batch["y"]).mean()', 'batch["y"]).mean(where=batch["valid"])'
    )
    of_torch = """
def torch_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).abs()[batch["valid"]].mean()
"""
    assert remarks(tmp_path, workers, half, masked + of_torch) == []
