"""optim.reduce_on_plateau against torch's ReduceLROnPlateau: rates, steps, sharding and checkpoints."""

import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.optim.lr_scheduler import ReduceLROnPlateau

from jaxddp import DistributedDataParallel, Loader, optim
from jaxddp.checkpoint import Checkpoints
from jaxddp.errors import InputError
from tests.support.step_cases import first

TOLERANCE = 1e-12  # relative, float64; measured: 4.4e-16 of a rate, 8.1e-15 of a parameter
EPOCHS = 100
LRS = (0.1, 0.02)


def drawn(seed: int) -> tuple[dict[str, Any], list[float]]:
    """Return options, and a metric for each epoch: falling or rising, with noise, ties, NaN and infinity."""
    rng = random.Random(seed)
    mode, threshold_mode = rng.choice(["min", "max"]), rng.choice(["rel", "abs"])
    options = {
        **{"mode": mode, "threshold_mode": threshold_mode, "threshold": rng.choice([0.0, 1e-4, 0.05])},
        **{"factor": rng.choice([0.5, 0.1, 0.9]), "patience": rng.randint(0, 4), "cooldown": rng.randint(0, 3)},
        **{"min_lr": rng.choice([0.0, 1e-3, [1e-3, 1e-4]]), "eps": rng.choice([1e-8, 1e-3])},
    }
    slope = -0.02 if mode == "min" else 0.02
    metrics = [rng.choice([slope * min(t, 60), 0.0]) + rng.choice([0.0, rng.gauss(0, 0.1)]) for t in range(EPOCHS)]
    for wild in (math.nan, math.nan, math.inf, -math.inf)[: rng.randint(0, 4)]:
        metrics[rng.randrange(EPOCHS)] = wild
    return options, metrics


def of_torch(options: dict[str, Any], metrics: list[float]) -> np.ndarray:
    """Return the rates of both groups after each epoch."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in LRS]
    optimizer, visited = torch.optim.SGD(groups), []
    scheduler = ReduceLROnPlateau(optimizer, **options)
    for metric in metrics:
        scheduler.step(metric)
        visited.append([group["lr"] for group in optimizer.param_groups])
    return np.array(visited)


def of_jax(options: dict[str, Any], metrics: list[float]) -> np.ndarray:
    optimizer = optim.reduce_on_plateau(lambda one, other: optim.sgd(one), LRS, **options)
    state = optimizer.init(jnp.zeros(1))

    def epoch(state: Any, metric: jax.Array) -> Any:
        state = optim.observed(state, metric)
        return state, jnp.stack(state.plateau.rates)

    return np.asarray(jax.lax.scan(epoch, state, jnp.asarray(metrics))[1])


def test_rates_equal_torchs(x64: None) -> None:
    fell = 0
    for seed in range(12):
        options, metrics = drawn(seed)
        truth = of_torch(options, metrics)
        np.testing.assert_allclose(of_jax(options, metrics), truth, TOLERANCE, err_msg=str(options))
        fell += len(np.unique(truth[:, 0])) > 2
    assert fell > 6


@pytest.mark.parametrize(
    "change", [{"patience": 1}, {"cooldown": 1}, {"threshold": 1e-2}, {"eps": 0.05}, {"min_lr": 1e-2}]
)
def test_the_comparison_catches(change: dict[str, Any], x64: None) -> None:
    options = {"patience": 2, "cooldown": 0, "threshold": 1e-4, "factor": 0.5}
    metrics = [1.0, 0.999, 0.998, 0.997, math.nan, 1.0, 1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, *[1.0] * 9]
    truth = of_torch(options, metrics)
    np.testing.assert_allclose(of_jax(options, metrics), truth, TOLERANCE)
    assert np.abs(of_jax(options | change, metrics) / truth - 1).max() > 0.1


def test_optaxs_plateau_falls_an_epoch_earlier(x64: None) -> None:
    """If these become equal, the table in docs/optimizers.md is wrong."""
    metrics = [1.0] * 10
    theirs = optax.contrib.reduce_on_plateau(factor=0.5, patience=3, cooldown=0)
    state, scales = theirs.init(jnp.zeros(1)), []
    for metric in metrics:
        _, state = theirs.update(jnp.zeros(1), state, value=metric)
        scales.append(float(state.scale))
    ours = of_jax({"factor": 0.5, "patience": 3}, metrics)[:, 0] / LRS[0]
    assert (scales.index(0.5), list(ours).index(0.5)) == (3, 4)


@pytest.mark.parametrize("name", ["sgd", "adamw", "asgd", "adagrad"])
def test_steps_with_a_plateau_equal_torchs(name: str, x64: None) -> None:
    classes = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "asgd": torch.optim.ASGD,
        "adagrad": torch.optim.Adagrad,
    }
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=3), rng.normal(size=(100, 3))
    parameter = torch.nn.Parameter(torch.tensor(start))
    reference = classes[name]([parameter], lr=0.1, weight_decay=0.1)
    scheduler = ReduceLROnPlateau(reference, patience=1, factor=0.5)
    optimizer = optim.reduce_on_plateau(
        lambda rate: getattr(optim, name)(rate, weight_decay=0.1), 0.1, patience=1, factor=0.5
    )
    params, update = jnp.asarray(start), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients):
        parameter.grad = torch.tensor(gradient)
        reference.step()
        updates, state = update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
        if step % 5 == 4:
            metric = float(step < 50)
            scheduler.step(metric)
            state = optim.observed(state, metric)
        truth = parameter.detach().numpy()
        assert np.abs(params - truth).max() <= TOLERANCE * np.abs(truth - start).max()
    assert reference.param_groups[0]["lr"] < 1e-2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_trainer_observes_between_epochs_and_saves_the_rate(sharded: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(16, 3)).astype("float32"), "y": rng.normal(size=(16, 1)).astype("float32")}

    def trainer(count: int) -> DistributedDataParallel:
        optimizer = optim.reduce_on_plateau(lambda rate: optim.sgd(rate, momentum=0.5), 0.1, patience=0)
        loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]  # noqa: E731
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return DistributedDataParallel(model, optimizer, loss, replicas=first(count), shard_optimizer=sharded)

    def epoch(ddp: DistributedDataParallel, state: Any) -> Any:
        for batches in Loader(data, ddp.replicas, global_batch_size=16).epoch(0):
            state, _ = ddp.steps(state, batches)
        return state

    def movement(ddp: DistributedDataParallel, state: Any) -> np.ndarray:
        before = ddp.values(state)[0]["kernel"]
        return ddp.values(epoch(ddp, state))[0]["kernel"] - before

    ddp = trainer(2)
    state = ddp.observed(ddp.init(), 1.0)
    fast = movement(ddp, jax.tree.map(jnp.copy, state))
    state = ddp.observed(state, 1.0)
    ddp.verify(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.create()
    checkpoints.save(ddp.unsharded(state))
    checkpoints.wait()
    other = trainer(4)
    restored = other.place_state(checkpoints.restore(other.unsharded(other.init())))
    for trained, at in ((ddp, state), (other, restored)):
        np.testing.assert_allclose(movement(trained, at), 0.1 * fast, 1e-5)


def test_what_makes_no_plateau_is_refused() -> None:
    with pytest.raises(InputError, match=r"^factor 1.0: must be at least 0 and below 1$"):
        optim.reduce_on_plateau(optim.sgd, factor=1.0)
    with pytest.raises(InputError, match=r"^min_lr \[0.1, 0.2\]: must be one number, or one for each of 1 rates$"):
        optim.reduce_on_plateau(optim.sgd, min_lr=[0.1, 0.2])
    with pytest.raises(InputError, match=r"^mode least: unknown \(one of min, max\)$"):
        optim.reduce_on_plateau(optim.sgd, mode="least")
    ddp = DistributedDataParallel(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optim.sgd(0.1), replicas=first(2))
    with pytest.raises(InputError, match=r"^observed: the optimizer has no plateau"):
        ddp.observed(ddp.init(), 1.0)
