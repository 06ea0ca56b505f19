"""A change of one element that the excerpts of a large tensor leave out is a difference."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.excerpts import distance
from jaxddp.parity.report.report import Report
from jaxddp.parity.workers import Workers

ROW, COLUMN = 7, 33  # of a kernel in jax, which torch has transposed; no multiple of the excerpt's distance
PORT = f"""
import jax, numpy as np, optax, torch
from flax import nnx
from jax import numpy as jnp
names = {{"layers": ""}}
AT = ({ROW}, {COLUMN})
def torch_model(): return torch.nn.Sequential(torch.nn.Linear(400, 350), torch.nn.Tanh(), torch.nn.Linear(350, 2))
def torch_loss(m, b): return m(b["x"]).square().mean()
def jax_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(400, 350, rngs=rngs), nnx.tanh, nnx.Linear(350, 2, rngs=rngs))
def jax_loss(m, b): return jnp.square(m(b["x"])).mean()
torch_optimizer = lambda p: torch.optim.AdamW(p, lr=1e-2)
jax_optimizer = optax.adamw(1e-2, weight_decay=0.01)
def batch(step, rank): return {{"x": np.random.default_rng((step, rank)).normal(size=(6, 400))}}
def at_one(tree, value): return jax.tree.map(lambda x: x.at[AT].set(value) if x.shape == (400, 350) else x, tree)
"""
LEFT_OUT = "optax.chain(optax.adamw(1e-2, weight_decay=0.01), optax.stateless(lambda u, p: at_one(u, 0.0)))"
NOT_SUMMED = "optax.chain(optax.stateless(lambda u, p: at_one(u, 1e-4)), optax.adamw(1e-2, weight_decay=0.01))"
STOPPED = """
def jax_loss(m, b):
    kernel = m.layers[0].kernel
    m.layers[0].kernel = nnx.Param(kernel.at[AT].set(jax.lax.stop_gradient(kernel[AT])))
    return jnp.square(m(b["x"])).mean()
"""
STEP = """
import dataclasses
def jax_step(loss, optimizer, state, batch):
    (value, _), local = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    grads = CHANGED(jax.lax.pmean(local, "replica"))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"local_loss": value, "local_gradients": local, "gradients": grads}
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1, "cpu") as workers:
        yield workers


def report_on(folder: Path, workers: Workers, text: str) -> Report:
    (folder / "port.py").write_text(text)
    return check(folder / "port.py", world_size=1, steps=2, numerics=False, causes=False, quick=True, workers=workers)


@pytest.mark.parametrize("more", ["", STEP.replace("CHANGED", "")], ids=["its step", "an own step"])
def test_a_right_port_is_equal(more: str, tmp_path: Path, workers: Workers) -> None:
    report = report_on(tmp_path, workers, PORT + more)
    assert report.verdict == "equal", str(report)


@pytest.mark.parametrize(
    ("more", "stage"),
    [
        (f"jax_optimizer = {LEFT_OUT}", "update"),
        (f"jax_optimizer = {NOT_SUMMED}", "update"),
        (STOPPED, "local_gradients"),
        (STEP.replace("CHANGED", "(lambda tree: at_one(tree, 0.0))"), "gradients"),
    ],
    ids=["update", "moments", "local gradients", "gradients"],
)
def test_one_element_beside_the_excerpt_is_a_difference(
    more: str, stage: str, tmp_path: Path, workers: Workers
) -> None:
    assert (COLUMN * 400 + ROW) % distance((350, 400))
    report = report_on(tmp_path, workers, PORT + more)
    assert report.exit_code() == 1
    assert (report.differences[0].stage, report.differences[0].tensor) == (stage, "0.weight"), str(report)
