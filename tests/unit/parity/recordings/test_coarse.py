"""Float32 and tiny gradients: of causes that cannot be told apart, the simplest comes first, and none alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax import numpy as jnp
from torch import nn

from jaxddp.parity import Recorder, Report, compare_runs
from jaxddp.parity.report.sentences import sentences

FEATURES, HIDDEN, CLASSES, EXAMPLES, STEPS = 200, 8, 5, 40, 6
Make = Callable[[nn.Module], torch.optim.Optimizer]


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return words that are rare and small, and classes."""
    rng = np.random.default_rng(0)
    x = (rng.random((EXAMPLES, FEATURES)) < 0.05) / 20.0
    return x.astype(np.float32), rng.integers(0, CLASSES, EXAMPLES)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, CLASSES, bias=False))


def penalty_of(weights: Any, factor: float) -> Any:
    return factor * sum((w**2).sum() for w in weights)


def record_torch(folder: Path, make: Make, penalty: float = 0.0) -> None:
    x, y = map(torch.from_numpy, batch())
    model = model_of()
    optimizer = make(model)
    recorder = Recorder(folder, STEPS)
    recorder.watch(model, optimizer)
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), y) + penalty_of(model.parameters(), penalty)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step({"x": x, "y": y}, loss)


def record_jax(folder: Path, tx: Any, penalty: float = 0.0) -> None:
    x, y = batch()
    weights = [jnp.asarray(w.numpy().T) for w in model_of().state_dict().values()]
    params = {"0": {"kernel": weights[0]}, "2": {"kernel": weights[1]}}
    opt_state = tx.init(params)
    recorder = Recorder(folder, STEPS)
    recorder.watch(params)

    def loss_of(params: Any) -> jax.Array:
        logits = jnp.tanh(x @ params["0"]["kernel"]) @ params["2"]["kernel"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean() + penalty_of(jax.tree.leaves(params), penalty)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), opt_state

    for _ in range(STEPS):
        loss, grads, params, opt_state = step(params, opt_state)
        recorder.step({"x": x, "y": y}, loss, grads=grads, params=params)


def adam(**options: Any) -> Make:
    return lambda model: torch.optim.Adam(model.parameters(), lr=0.01, **options)


def sgd(**options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **options)


def adam_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.parameters()
    return torch.optim.Adam([{"params": [first], "lr": 0.01}, {"params": [second], "lr": 0.02}])


# torch's optimizer, JAX's, and the first cause that is said.
FAULTS: dict[str, tuple[Make, Any, str]] = {
    "decay missing": (adam(weight_decay=5e-4), optax.adam(0.01), "weight decay 0, the reference has 0.0005"),
    "decay of SGD missing": (sgd(weight_decay=5e-4), optax.sgd(0.1), "weight decay 0, the reference has 0.0005"),
    "momentum missing": (sgd(momentum=0.9), optax.sgd(0.1), "momentum 0, the reference has 0.9"),
    "momentum": (sgd(momentum=0.9), optax.sgd(0.1, momentum=0.8), "momentum 0.8, the reference has 0.9"),
    "Nesterov missing": (
        sgd(momentum=0.9, nesterov=True),
        optax.sgd(0.1, momentum=0.9),
        "Nesterov momentum in the reference only",
    ),
    "beta2": (adam(betas=(0.9, 0.99)), optax.adam(0.01), "beta2 0.999, the reference has 0.99"),
    "eps": (adam(eps=1e-5), optax.adam(0.01), "eps 1e-8, the reference has 1e-5"),
    "rate of a group": (adam_in_groups, optax.adam(0.01), "learning rate of 2.weight times 0.5"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simplest_cause_comes_first(fault: str, tmp_path: Path) -> None:
    make, tx, says = FAULTS[fault]
    record_torch(tmp_path / "torch", make)
    record_jax(tmp_path / "jax", tx)
    report = compare_runs(tmp_path / "torch", tmp_path / "jax")
    (difference,) = report.differences
    assert difference.stage == "update" and difference.cause, str(report)
    assert sentences(difference.cause)[0] == says
    text = " ".join(str(report).split())
    assert (" either " in text and " or " in text and " cause " not in text) == (len(difference.cause.names) > 1)


def test_a_missing_decay_is_not_the_only_cause_that_explains_the_updates(tmp_path: Path) -> None:
    make, tx, _ = FAULTS["decay missing"]
    record_torch(tmp_path / "torch", make)
    record_jax(tmp_path / "jax", tx)
    cause = compare_runs(tmp_path / "torch", tmp_path / "jax").differences[0].cause
    assert cause and cause.names[:2] == ("decay_value", "coupled_decay")
    assert "decay_rounded_away" not in cause.names


def compared(tmp_path: Path, of_torch: float, of_jax: float) -> Report:
    record_torch(tmp_path / "torch", sgd(), of_torch)
    record_jax(tmp_path / "jax", optax.sgd(0.1), of_jax)
    return compare_runs(tmp_path / "torch", tmp_path / "jax")


@pytest.mark.parametrize(("of_torch", "of_jax"), [(0.0, 5e-4), (5e-4, 0.0)], ids=["jax", "torch"])
def test_a_penalty_in_one_loss_is_told_by_the_gradients(of_torch: float, of_jax: float, tmp_path: Path) -> None:
    report = compared(tmp_path, of_torch, of_jax)
    (difference,) = report.differences
    assert difference.stage == "gradients" and difference.cause, str(report)
    assert difference.cause.names == ("penalty_in_loss",)
    sides = ("jax", "torch") if of_jax else ("torch", "jax")
    assert sentences(difference.cause)[0] == (
        f"{sides[0]}'s gradients are {sides[1]}'s plus 0.001 times the weights, as of an L2 penalty in {sides[0]}'s "
        "loss, 0.0005 times the sum of the squared weights"
    )


def test_the_same_penalty_on_both_sides_is_equal(tmp_path: Path) -> None:
    report = compared(tmp_path, 5e-4, 5e-4)
    assert report.verdict == "equal", str(report)
