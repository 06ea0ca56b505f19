"""Metrics of steps: learning rate and gradient norm are the same numbers from both trainers."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.step.gradient_stats import learning_rates
from tests.support.run_files import LINE, OWN_OPTIMIZERS, assert_same, in_jax, in_torch, start, write
from tests.support.train_runs import records

PLATEAU = LINE + '\nschedule, patience, factor, threshold = "plateau", 0, 0.5, 0.9'
SPARSE = LINE + "\nlog_every = 2"
CLIPPED = LINE + '\nclip_grad_norm, momentum, schedule, warmup_steps = 0.1, 0.9, "warmup_cosine", 3'


def steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == "step"]


@pytest.mark.parametrize(
    ("line", "rates"), [(LINE, [0.05]), (PLATEAU, [0.05, 0.025]), (CLIPPED, None), (SPARSE, [0.05])]
)
def test_steps_have_the_norm_of_the_gradient_and_the_learning_rate(
    line: str, rates: list[float] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, weights = write(tmp_path, (LINE, line)), start(tmp_path)
    for side in (in_jax, in_torch):
        side(path, tmp_path / side.__name__, weights=weights, epochs=3)
    of_jax, of_torch = steps(tmp_path / "in_jax"), steps(tmp_path / "in_torch")
    assert_same(of_jax, of_torch)
    assert all(record["grad_norm"] > 0 for record in of_jax)
    seen = [record["lr"] for record in of_jax]
    assert len(set(seen)) > 10 if rates is None else set(seen) == set(rates)
    assert "grad_norm" not in capsys.readouterr().out  # in the logs, and not on the console


def test_a_run_without_test_data_ends_with_its_train_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, (LINE, LINE + "\nearly_stopping_patience = 1"), ("def test_data", "def nothing"))
    for side in (in_jax, in_torch):
        (last,) = side(path, tmp_path / side.__name__, epochs=1)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2].startswith(f"train loss {last['train_loss']:8.6f}")
        side(path, tmp_path / f"{side.__name__} stopped", epochs=9, lr=0.0)
        assert "stopped early: no smaller loss in 1 epoch\n" in capsys.readouterr().out.replace("   repl", "\nrepl")


def test_groups_of_torchs_optimizer_have_a_rate_each(tmp_path: Path) -> None:
    groups = "[{'params': parameters[:2]}, {'params': parameters[2:], 'lr': 0.5}]"
    path = write(tmp_path, more=OWN_OPTIMIZERS.replace("SGD(parameters, lr", f"SGD({groups}, lr"))
    in_torch(path, tmp_path / "run", epochs=1)
    rates = [(record["lr/0"], record["lr/1"]) for record in steps(tmp_path / "run")]
    assert rates[0] == pytest.approx((0.1, 0.5)) and rates[0][0] > rates[1][0]


def test_rates_of_a_users_optimizer_are_read_where_its_state_tells_them() -> None:
    params = {"w": jnp.ones(2)}

    def rates(optimizer: Any, lr: Any = None) -> dict[str, float]:
        before = optimizer.init(params)
        for _ in range(3):
            _, after = optimizer.update(params, before, params)
            named = learning_rates(before, after, lr)
            before = after
        return {name: float(value) for name, value in named.items()}

    falling = optax.linear_schedule(1.0, 0.0, 10)
    assert rates(optax.inject_hyperparams(optax.adam)(falling)) == {"lr": pytest.approx(0.8)}
    assert rates(optim.adam(falling), falling) == {"lr": pytest.approx(0.8)}
    assert rates(optax.adam(falling)) == {}
    plateau = optim.reduce_on_plateau(lambda one, two: optim.sgd(one), lr=(0.5, 0.25))
    assert rates(plateau) == {"lr/0": 0.5, "lr/1": 0.25}
    assert np.isclose(rates(optax.sgd(0.1), 0.1)["lr"], 0.1)
