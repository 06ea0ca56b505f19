"""Post-local SGD against torch: the parameters of every replica, step by step."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from jaxddp import cli, optim
from jaxddp.comm_hooks import bf16_compress
from jaxddp.config import TrainConfig
from jaxddp.data_parallel import DistributedDataParallel
from jaxddp.distributed.collectives import all_reduce_mean
from jaxddp.errors import InputError
from jaxddp.nn.torch_weights import load_weights
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.jax_side.checked_step import forget_programs
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.step.post_local_sgd import PostLocalSGD
from jaxddp.step.replicated import Replicated
from jaxddp.train import main
from tests.support.cases import even_case
from tests.support.step_cases import Net, dealt
from tests.support.step_cases import first as first_replicas
from tests.support.trajectories import check_equal, run_in_both

TOLERANCE = 1e-12  # float64; measured: up to 2.5e-15, in a single replica's parameters 1.8e-14
FAULT = 1e-2  # smallest difference, of the parameters' change, that a fault must cause; measured: 0.16
STEPS = 9


def case_of(world_size: int = 2, period: int = 2, start: int = 3, **options: Any) -> Any:
    defaults = {"momentum": 0.9, "accumulation_steps": 2, "clip_grad_norm": 0.3, "steps": STEPS}
    rhythm = {"start_local_sgd_iter": start, "local_sgd_period": period}
    return even_case("mlp", "sgd", world_size, **(defaults | options | rhythm))


def of_each(run: Trajectory, step: int, world_size: int) -> dict[str, np.ndarray]:
    """Return every replica's parameters, (W, ...)."""
    record = run.records[step]
    equal = {name: np.broadcast_to(value, (world_size, *value.shape)) for name, value in record["params"].items()}
    local = {key.removeprefix("params:"): x for key, x in record["spread"].items() if key.startswith("params:")}
    return equal | local


def farthest(jax_run: Trajectory, torch_run: Trajectory, world_size: int) -> tuple[float, int]:
    """Return any replica's largest difference, relative to a tensor's change, and the first step beyond tolerance."""
    worst, first = 0.0, 0
    for step in range(STEPS):
        expected = torch_run.records[step]["local_params"]
        for name, value in of_each(jax_run, step, world_size).items():
            moved = np.abs(expected[name] - torch_run.start[name]).max()
            off = float(np.abs(value - expected[name]).max() / moved)
            worst, first = max(worst, off), first or (step + 1 if off > TOLERANCE else 0)
    return worst, first


@pytest.mark.one_in(4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("period", [2, 3])
def test_every_replica_takes_torchs_steps(period: int, world_size: int, pool: TorchPool) -> None:
    case = case_of(world_size, period)
    jax_run, torch_run = run_in_both(case, pool)
    check_equal((jax_run, torch_run), TOLERANCE)
    off, _ = farthest(jax_run, torch_run, world_size)
    assert off < TOLERANCE
    local = [any(key.startswith("params:") for key in record["spread"]) for record in jax_run.records]
    assert local == [step > 3 and (step - 3) % period != 0 for step in range(STEPS)]


# ---- controls


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Return a function that replaces a method of PostLocalSGD; forget compiled programs around the test."""
    forget_programs()
    yield lambda name, fault: monkeypatch.setattr(PostLocalSGD, name, fault)
    forget_programs()


def averages_gradients(self: PostLocalSGD, gradients: Any, step: jax.Array) -> Any:
    """Average the gradients in the steps that should average the parameters."""
    return lax.cond((step < self.start_iter) | self.averages(step), all_reduce_mean, lambda own: own, gradients)


# Fault -> other options, replaced methods, and the first step after which parameters differ.
CHANGES: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "another period": ({"period": 3}, {}, 6),
    "starts one step later": ({"start": 4}, {}, 4),
    "starts one step earlier": ({"start": 2}, {}, 3),
    "parameters never averaged": ({}, {"update": Replicated.update}, 4),
    "gradients averaged instead": ({}, {"update": Replicated.update, "mean": averages_gradients}, 4),
    "gradients averaged in every step": ({}, {"mean": Replicated.mean}, 4),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CHANGES)
def test_wrong_averaging_is_detected(name: str, plant: Callable[[str, Any], None], pool: TorchPool) -> None:
    other, faults, step = CHANGES[name]
    for method, fault in faults.items():
        plant(method, fault)
    off, first = farthest(*run_in_both(case_of(), pool, case_of(**other)), 2)
    assert first == step and off > FAULT


# ---- the compiled program, evaluation, options


def trainer_of(world_size: int, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        Net(), optim.adam(0.01), replicas=first_replicas(world_size), local_sgd=PostLocalSGD(1, 3), **options
    )


@pytest.mark.large
def test_a_local_step_sends_metrics_only() -> None:
    """Only metrics are reduced outside the branches; gradients and parameters have one branch each."""
    trainer = trainer_of(2)
    hlo = trainer.compiled_text(trainer.init(), trainer.replicas.shard(dealt(2, 3, (2, 2))))
    computations = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%(\S+) [^\n]*{\n(.*?)^}", hlo, re.M | re.S)}
    branches = set(re.findall(r"%([^\s,{}]+)", " ".join(re.findall(r"branch_computations={(.*?)}", hlo))))
    sent = {name: re.findall(r"= (.*?) all-reduce\(", text) for name, text in computations.items()}
    always = [shape for name, shapes in sent.items() if name not in branches for shape in shapes]
    assert [re.sub(r"{.*?}", "", shape) for shape in always] == ["f32[3]"]  # loss, count, accuracy
    assert [len(shapes) for name, shapes in sent.items() if name in branches and shapes] == [1, 1]


@pytest.mark.large
def test_evaluation_and_saved_values_use_the_mean_of_the_replicas() -> None:
    trainer, batch = trainer_of(2), dealt(2, 3, (4,))
    state, _ = trainer.steps(trainer.init(), trainer.replicas.shard(batch))
    own = jax.device_get(state.params)
    assert all(not np.array_equal(x[0], x[1]) for x in own.values())
    trainer.verify(state)  # local parameters are not compared
    params, _ = trainer.values(state)
    for name, value in params.items():
        np.testing.assert_allclose(value, own[name].mean(axis=0), rtol=1e-6)
    one = DistributedDataParallel(Net(), optim.adam(), replicas=first_replicas(1))
    data = {name: x[0, 0] for name, x in batch.last.items()}
    alone = one.evaluate(one.init(params), data)["loss"]
    assert trainer.evaluate(state, data)["loss"] == pytest.approx(alone, rel=1e-6)
    assert one.evaluate(one.init({n: x[0] for n, x in own.items()}), data)["loss"] != pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_decay": 0.9}, "^ema_decay: cannot be combined with local_sgd"),
        ({"shard_optimizer": True}, "^shard_optimizer: cannot be combined with local_sgd"),
        ({"loss_normalization": "global"}, "^loss_normalization: cannot be combined with local_sgd"),
        ({"comm_hook": bf16_compress()}, "^comm_hook: cannot be combined with local_sgd"),
    ],
)
def test_options_that_conflict_with_local_sgd_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trainer_of(2, **options)


# ---- the trainers


def run(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Run jaxddp.train and return its final weights."""
    config = {"dataset": "linear", "num_examples": 256, "hidden_sizes": (5,), "lr": 0.01, "platform": "cpu"}
    config |= {"devices": 2, "start_local_sgd_iter": 3, "local_sgd_period": 5, "epochs": 2, "output": str(folder)}
    main(TrainConfig(**config | changes))
    return load_weights(folder / "model.safetensors")


@pytest.mark.large
def test_a_resumed_run_is_exact_and_needs_as_many_replicas(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", epochs=1)
    parts = run(tmp_path / "parts", resume=str(tmp_path / "parts"))
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    argv = ["--resume", str(tmp_path / "parts"), "--devices", "4", "--epochs", "3"]
    with pytest.raises(InputError, match=r"^--devices 4: the run in .* has separate parameters for 2 replicas"):
        cli.parse(TrainConfig, argv, "train")
