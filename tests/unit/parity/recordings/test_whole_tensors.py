"""Recordings of a large tensor show a change of one element that their excerpts leave out."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from safetensors.numpy import load_file, save_file

from jaxddp.parity import Recorder, Report, compare_runs

AT = (7, 33)  # of a kernel (200, 300), of whose excerpt each index is even
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def examples(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(8, 200)).astype("float32")


def torch_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(200, 300, False), torch.nn.Tanh(), torch.nn.Linear(300, 2, False))


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("torch") / "run", torch_layers()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    recorder = Recorder(folder, 2)
    recorder.watch(model, optimizer)
    for step in (1, 2):
        x = torch.from_numpy(examples(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        recorder.step({"x": x}, loss)
    return folder


@jax.jit
@jax.value_and_grad
def gradients(params: dict[str, dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["0"]["kernel"])
    return jnp.square(hidden @ params["2"]["kernel"]).mean()


def compared(torch_run: Path, folder: Path, change: str = "", gives: bool = True) -> Report:
    """Record JAX's loop, in which an element of a stage may be another, and compare."""
    state = {name: x.numpy() for name, x in torch_layers().state_dict().items()}
    params = {n: {"kernel": jnp.asarray(state[f"{n}.weight"].T)} for n in "02"}
    optimizer = optax.adamw(ADAMW["lr"], weight_decay=ADAMW["weight_decay"])
    opt_state, recorder = optimizer.init(params), Recorder(folder, 2)
    recorder.watch(params)
    for step in (1, 2):
        loss, grads = gradients(params, examples(step))
        if change == "gradients":
            grads["0"]["kernel"] = grads["0"]["kernel"].at[AT].set(0.1)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        if change == "update":
            updates["0"]["kernel"] = updates["0"]["kernel"].at[AT].set(0.05)
        params = optax.apply_updates(params, updates)
        more = {"updates": updates} if gives else {}
        recorder.step({"x": examples(step)}, loss, grads=grads, params=params, opt_state=opt_state, lr=1e-3, **more)
    return compare_runs(torch_run, folder)


@pytest.mark.parametrize("gives", [True, False], ids=["updates", "parameters alone"])
def test_equal_runs_are_equal(gives: bool, torch_run: Path, tmp_path: Path) -> None:
    report = compared(torch_run, tmp_path / "jax", gives=gives)
    assert report.verdict == "equal", str(report)


@pytest.mark.parametrize(
    ("change", "gives"), [("gradients", True), ("update", True), ("update", False)], ids=["gradients", "given", "moved"]
)
def test_a_change_of_one_element_beside_the_excerpt_is_a_difference(
    change: str, gives: bool, torch_run: Path, tmp_path: Path
) -> None:
    report = compared(torch_run, tmp_path / "jax", change, gives)
    assert (change, 1, "0.weight") in [(d.stage, d.step, d.tensor) for d in report.differences], str(report)


def test_a_recording_of_an_earlier_version_is_read_and_the_lack_is_said(torch_run: Path, tmp_path: Path) -> None:
    compared(torch_run, tmp_path / "jax")
    for path in (tmp_path / "jax").rglob("*.safetensors"):
        save_file({key: x for key, x in load_file(path).items() if not key.startswith("projections")}, path)
    report = compare_runs(torch_run, tmp_path / "jax")
    assert report.verdict == "equal", str(report)
    assert any("No projections of whole tensors are compared" in says for says in report.idle)
