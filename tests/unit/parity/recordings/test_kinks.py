"""Recorded gradients behind a ReLU may jump by rounding: that is no difference, and hides none."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from torch import nn
from torch.utils.checkpoint import checkpoint

from jaxddp.parity import Recorder, Report, compare_runs
from jaxddp.parity.recorder.kinks import behind_kinks
from jaxddp.parity.recordings.judge import ALLOWED

FEATURES, HIDDEN, CLASSES, EXAMPLES, STEPS = 8, 24, 4, 64, 4


def batch_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(0.0, 1.0, (EXAMPLES, FEATURES)).astype("float32")
    return {"x": x, "y": rng.integers(0, CLASSES, EXAMPLES)}


def torch_model(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = nn.Linear(FEATURES, HIDDEN), act(), nn.Linear(HIDDEN, HIDDEN), act()
    return nn.Sequential(*hidden, nn.Linear(HIDDEN, CLASSES))


def train_torch(folder: Path, act: type[nn.Module] = nn.ReLU) -> None:
    model = torch_model(act)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = Recorder(folder, STEPS)
    recorder.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        batch = {name: torch.from_numpy(x) for name, x in batch_of(step).items()}
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        recorder.step(batch, loss)


def relu(x: jax.Array, tipped: bool) -> jax.Array:
    """Compute a ReLU whose derivative is the other one where its input is nearest to 0, as if rounding had moved it."""
    on = (x > 0) ^ (tipped & (jnp.abs(x) == jnp.abs(x).min()))
    return jax.lax.stop_gradient(jnp.maximum(x, 0.0) - x * on) + x * on


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return x with a gradient that is `factor` times too large."""
    return factor * x + jax.lax.stop_gradient(x - factor * x)


def train_jax(
    folder: Path,
    tips: tuple[int, ...] = (),
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0),
    act: Any = relu,
    shows: bool = True,
) -> None:
    """Train and record; at some steps a unit of the first layer tips, and layers' gradients have factors.

    `shows`: whether the recorder is given gradients.
    """
    state = torch_model().state_dict()
    params = {n: {"kernel": state[f"{n}.weight"].numpy().T, "bias": state[f"{n}.bias"].numpy()} for n in "024"}
    tx = optax.sgd(0.01)
    opt_state = tx.init(params)

    def loss_of(params: Any, batch: Any, tipped: Any) -> Any:
        first, second, third = factors
        x = scaled(act(batch["x"] @ params["0"]["kernel"] + params["0"]["bias"][None], tipped), first)
        x = scaled(act(x @ params["2"]["kernel"] + params["2"]["bias"][None], False), second)
        logits = scaled(x @ params["4"]["kernel"] + params["4"]["bias"][None], third)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @jax.jit
    def step_of(params: Any, opt_state: Any, batch: Any, tipped: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch, tipped)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, updates, optax.apply_updates(params, updates), opt_state

    recorder = Recorder(folder, STEPS)
    recorder.watch(params)
    for step in range(1, STEPS + 1):
        loss, grads, updates, params, opt_state = step_of(params, opt_state, batch_of(step), step in tips)
        gradients = {"grads": grads, "opt_state": opt_state} if shows else {}
        recorder.step(batch_of(step), loss, updates=updates, params=params, **gradients)


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch") / "run"
    train_torch(folder)
    return folder


def compared(torch_run: Path, folder: Path, **options: Any) -> Report:
    train_jax(folder, **options)
    return compare_runs(torch_run, folder)


@pytest.mark.parametrize(
    ("tips", "factors", "equal"),
    [((), (1.0, 1.0, 1.0), True), ((1, 2, 3, 4), (1.0, 1.0, 1.0), True), ((), (1.0, 1.0, 1.1), False)],
    ids=["right", "tips", "wrong"],
)
def test_a_tipped_unit_is_no_difference_of_updates_whose_gradients_are_not_shown(
    tips: tuple[int, ...],
    factors: tuple[float, float, float],
    equal: bool,
    torch_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALLOWED, "update", 1e4)  # a tenth, so that these tips are beyond it
    report = compared(torch_run, tmp_path / "jax", tips=tips, factors=factors, shows=False)
    worst = max(report.stages["update"].residuals)
    assert report.verdict == ("equal" if equal else "different"), str(report)
    assert (worst > 1e-3) == bool(tips or not equal)  # measured: 1e-2 by tips; 1e-7 without


@pytest.mark.parametrize(("tips", "says"), [((), ""), ((2,), "step 2 differs"), ((1, 2, 3, 4), "step 1 differs")])
def test_a_tipped_unit_is_no_difference_in_one_step_or_in_all(
    tips: tuple[int, ...], says: str, torch_run: Path, tmp_path: Path
) -> None:
    report = compared(torch_run, tmp_path / "jax", tips=tips)
    assert report.verdict == "equal", str(report)
    worst = max(value for value in report.stages["gradients"].residuals if value == value)
    assert (worst > 1e-3) == bool(tips)  # measured: 3e-3 and 1e-2; 1e-7 without a tip, which is allowed 6e-5
    assert (f"In the gradients, {says} by at most" in " ".join(str(report).split())) == bool(tips)


FAULTS: dict[str, dict[str, Any]] = {
    "the last layer's gradients": {"factors": (1.0, 1.0, 1.001)},
    "those of all layers behind a kink": {"factors": (1.0, 1.01, 1.0)},
    "too large for a tipped unit": {"factors": (1.2, 1.0, 1.0)},
    "the last layer's beside tipped units": {"factors": (1.0, 1.0, 1.001), "tips": (1, 2, 3, 4)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_gradients_is_told_behind_kinks_too(fault: str, torch_run: Path, tmp_path: Path) -> None:
    report = compared(torch_run, tmp_path / "jax", **FAULTS[fault])
    assert [(one.stage, one.step) for one in report.differences] == [("gradients", 1)], str(report)


def test_without_a_kink_gradients_of_most_steps_are_a_difference(tmp_path: Path) -> None:
    train_torch(tmp_path / "torch", nn.Tanh)
    train_jax(tmp_path / "jax", factors=(1.003, 1.0, 1.0), act=lambda x, tipped: jnp.tanh(x))
    assert compare_runs(tmp_path / "torch", tmp_path / "jax").verdict == "different"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (torch.relu, ["0.weight"]),
        (partial(torch.max_pool1d, kernel_size=2), ["0.weight"]),
        (torch.abs, ["0.weight"]),
        (torch.nn.functional.gelu, []),
        (partial(torch.softmax, dim=-1), []),
        (lambda x: x + torch.relu(x), ["0.weight"]),  # another path has no kink
        (Doubled.apply, None),  # in which a kink may be
        (partial(checkpoint, torch.relu, use_reentrant=True), None),
    ],
)
def test_parameters_behind_kinks_are_those_of_the_graph(act: Any, expected: list[str] | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    x = act(model[0](torch.ones(3, 4)))
    loss = nn.functional.linear(x, model[1].weight[:, : x.shape[1]]).sum()
    assert behind_kinks(loss, dict(model.named_parameters())) == expected
    loss.backward()
    assert behind_kinks(loss, dict(model.named_parameters())) == expected  # as the recorder calls it
    assert behind_kinks(loss.item(), dict(model.named_parameters())) is None
