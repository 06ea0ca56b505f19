"""Recordings of an LSTM whose cell has one bias in JAX, where torch's has two."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from torch import nn

from jaxddp.errors import InputError
from jaxddp.parity import Recorder, compare_runs, part, summed
from jaxddp.parity.recordings.names import read_names
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences

STEPS = 4


def batch_of(step: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).normal(size=(5, 3, 3))}


def train_torch(folder: Path, model: nn.LSTM, limit: int) -> None:
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    recorder = Recorder(folder, steps=STEPS, limit=limit)
    recorder.watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.as_tensor(batch_of(step)["x"]))[0].square().mean()
        loss.backward()
        optimizer.step()
        recorder.step(batch_of(step), loss)


def outputs(params: dict[str, Any], x: Any, swapped: bool) -> Any:
    h = c = jnp.zeros((len(x), 4))
    every = []
    for t in range(x.shape[1]):
        i, f, g, o = jnp.split(x[:, t] @ params["w_x"] + h @ params["w_h"] + params["b"][None], 4, axis=-1)
        f, o = (o, f) if swapped else (f, o)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        every.append(h)
    return jnp.stack(every)


def loss_of(params: dict[str, Any], x: Any, swapped: bool) -> jax.Array:
    return (outputs(params, x, swapped) ** 2).mean()


def train_jax(folder: Path, params: dict[str, Any], b2: float = 0.999, swapped: bool = False) -> None:
    params, optimizer = jax.tree.map(jnp.asarray, params), optax.adam(1e-2, b2=b2)
    recorder, state = Recorder(folder, steps=STEPS), optimizer.init(params)
    recorder.watch(params)
    for step in range(STEPS):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch_of(step)["x"], swapped)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        recorder.step(batch_of(step), loss, grads=gradients, updates=updates, params=params, opt_state=state)


def compared(folder: Path, frozen: bool, limit: int = 1000, **of_jax: Any) -> Report:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True, dtype=torch.float64)
    if frozen:
        model.bias_hh_l0.requires_grad_(False)
    w_x, w_h, *biases = (x.detach().numpy().copy() for x in model.parameters())
    with jax.enable_x64(True):
        train_torch(folder / "torch", model, limit)
        train_jax(folder / "jax", {"w_x": w_x.T, "w_h": w_h.T, "b": sum(biases)}, **of_jax)
        return compare_runs(folder / "torch", folder / "jax")


def test_the_sum_moves_by_two_updates_in_torch(tmp_path: Path) -> None:
    report = compared(tmp_path, frozen=False)
    (difference,) = report.differences
    assert (difference.stage, difference.step, difference.tensor) == ("update", 1, "bias_ih_l0")
    assert difference.cause is not None and difference.cause.names == ("sum_moved_once",)
    assert sentences(difference.cause) == (
        "torch moves bias_ih_l0, bias_hh_l0 by an update each, jax their sum by one",
    )


def test_with_one_trained_bias_the_recordings_are_equal(tmp_path: Path) -> None:
    report = compared(tmp_path, frozen=True)
    assert report.verdict == "equal" and not report.idle, str(report)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "beta2": ({"b2": 0.99}, "update"),
    "gates": ({"swapped": True}, "local_loss"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_beside_the_sum_is_found(fault: str, frozen: bool, tmp_path: Path) -> None:
    options, stage = FAULTS[fault]
    report = compared(tmp_path, frozen, **options)
    assert report.differences[0].stage == stage, str(report)
    assert {one.stage for one in report.differences} == ({stage} if frozen else {stage, "update"})


def test_a_sum_of_excerpts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="torch: bias_hh_l0: a sum of excerpts; must be recorded with"):
        compared(tmp_path, frozen=False, limit=8)


def test_a_table_with_a_sum_is_read_from_a_file(tmp_path: Path) -> None:
    table = {"b": summed("gru.bias_ih_l0", part("gru.bias_hh_l0", 0, of=(8, 4)))}
    (tmp_path / "port.py").write_text(f"names = {table}")
    assert read_names(tmp_path / "port.py") == table
