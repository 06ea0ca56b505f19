"""Checkpoints of torch_ref: runs resume bit for bit, and checkpoints that do not fit are refused."""

import dataclasses
import errno
import os
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from jaxddp.data import datasets
from jaxddp.errors import InputError, TrainingError
from jaxddp.files import UNFINISHED
from jaxddp.tracking.metrics_file import read_metrics
from tests.support.torch_cases import case, small, train_whole_and_in_parts
from torch_ref import models, optim
from torch_ref import train as training
from torch_ref import train_loop as loop
from torch_ref.checkpoint import checkpoint_size, load_checkpoint, save_checkpoint
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.state import TrainState, averaged_model
from torch_ref.step import train_step
from torch_ref.weights import load_weights, save_weights


def interrupted(config: TorchConfig, monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Train and stop in the middle of `epoch`."""
    with monkeypatch.context() as patch:
        make_step = loop.train_step

        steps = count()

        def stop_in_time(*args: object, **options: object) -> object:
            if next(steps) == epoch * 4 + 2:
                raise KeyboardInterrupt
            return make_step(*args, **options)

        patch.setattr(loop, "train_step", stop_in_time)
        with pytest.raises(KeyboardInterrupt):
            training.main(config)


def resumed_ends_as_whole(folder: Path, **changes: object) -> bool:
    """Resume the run in "halves" and compare its weights with those of "whole"."""
    training.main(small(folder / "halves", resume=str(folder / "halves"), **changes))
    whole, halves = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", "halves"))
    return whole == halves


@pytest.mark.parametrize(
    ("options", "epoch"),
    [
        ({"ema_decay": 0.9, "dropout": 0.3}, 3),
        ({"amp": "fp16", "init_scale": 2.0**22, "growth_interval": 3}, 3),  # overflows at first, then not
        ({}, 1),  # before its first checkpoint, so it starts again
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(
    options: dict, epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    training.main(small(whole, **options))
    interrupted(small(halves, **options), monkeypatch, epoch)
    assert not (halves / "model.safetensors").exists() and (halves / "checkpoint.pt").exists() == (epoch > 1)
    assert resumed_ends_as_whole(tmp_path, **options)
    if "ema_decay" in options:
        averages = [(folder / "model_averaged.safetensors").read_bytes() for folder in (whole, halves)]
        assert averages[0] == averages[1]
    records = [
        [{**record, "examples_per_second": 0} for record in read_metrics(folder / "metrics.jsonl")]
        for folder in (whole, halves)
    ]
    assert records[0] == records[1]
    assert "amp" not in options or 2 < len({record.get("scale") for record in records[0]}) < 12
    assert {path.name for path in halves.iterdir()} >= {path.name for path in whole.iterdir()}


@pytest.mark.large
@pytest.mark.parametrize(
    "feature",
    [{"shard_optimizer": True, "schedule": "step", "step_size": 3}, {"start_local_sgd_iter": 2, "local_sgd_period": 3}],
    ids=["sharded", "local sgd"],
)
def test_a_resumed_run_of_several_ranks_equals_the_uninterrupted_run(feature: dict, tmp_path: Path) -> None:
    launch(train_whole_and_in_parts, case(output=str(tmp_path), epochs=2, **feature))
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_a_run_that_starts_again_loads_its_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "whole")
    start = str(tmp_path / "start.safetensors")
    save_weights(Path(start), models.build(dataclasses.replace(config, seed=9), datasets.load(config)))
    training.main(dataclasses.replace(config, weights=start))
    interrupted(small(tmp_path / "halves", weights=start), monkeypatch, epoch=1)
    assert resumed_ends_as_whole(tmp_path, weights=start)


def test_resume_refuses_other_epochs_and_runs_of_jaxddp(tmp_path: Path) -> None:
    config = small(tmp_path / "run", epochs=1, drop_last=True, schedule="constant")
    training.main(config)
    more = dataclasses.replace(config, resume=config.output, devices=16, strategy="single")
    with pytest.raises(InputError, match=r"^--resume .*run: its epochs had 4 steps and would now have 3; "):
        training.main(more)
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"run: holds a run of jaxddp.train; resume it with jaxddp.train$"):
        training.main(dataclasses.replace(config, resume=config.output))


def test_fewer_epochs_than_are_done_are_refused(tmp_path: Path) -> None:
    config = small(tmp_path / "run")
    training.main(config)
    with pytest.raises(InputError, match=r"^--epochs 3: the run in .*run has done 4 epochs already$"):
        training.main(dataclasses.replace(config, resume=config.output, epochs=3))


def test_a_run_resumed_without_moments_ends_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training.main(small(tmp_path / "whole"))
    interrupted(small(tmp_path / "halves"), monkeypatch, epoch=3)
    path = tmp_path / "halves" / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    for moments in content["optimizer"].values():
        moments["exp_avg"].zero_()
    torch.save(content, path)
    assert not resumed_ends_as_whole(tmp_path)


def new_state(config: TorchConfig) -> TrainState:
    torch.manual_seed(config.seed)
    module = nn.Linear(3, 2)
    return TrainState(module, *optim.from_config(module.parameters(), config, total_steps=20))


@pytest.mark.parametrize("schedule", ["constant", "step", "warmup_cosine", "one_cycle"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_checkpoints_restore_every_optimizer_and_schedule(tmp_path: Path, schedule: str, optimizer: str) -> None:
    options = {"warmup_cosine": {"warmup_steps": 4}, "step": {"step_size": 3}}.get(schedule, {})
    momentum = None if optimizer == "adam" else 0.9
    config = TorchConfig(optimizer=optimizer, momentum=momentum, lr=0.1, schedule=schedule, **options)

    def advance(state: TrainState, steps: int) -> None:
        for step in range(state.step, state.step + steps):
            batch = {"x": torch.full((4, 3), step / 10), "y": torch.arange(4) % 2}
            train_step(state.module, state.optimizer, state.scheduler, [batch], World())
        state.step += steps

    through, resumed = new_state(config), new_state(config)
    advance(through, 6)
    save_checkpoint(tmp_path / "checkpoint.pt", through)
    load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    for state in (through, resumed):
        advance(state, 10)
    assert torch.equal(through.module.weight, resumed.module.weight)
    assert through.optimizer.param_groups[0]["lr"] == resumed.optimizer.param_groups[0]["lr"]


def test_flags_override_the_resumed_checkpoint(tmp_path: Path) -> None:
    state = new_state(TorchConfig(lr=0.1))
    save_checkpoint(tmp_path / "checkpoint.pt", dataclasses.replace(state, step=5))
    resumed = new_state(TorchConfig(lr=0.2))
    state.optimizer.step()
    with pytest.raises(InputError, match="missing bias: exp_avg"):  # saved before its first step
        load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    train_step(state.module, state.optimizer, None, [{"x": torch.ones(2, 3), "y": torch.zeros(2).long()}], World())
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no checkpoint of torch_ref (no checkpoint.pt there)"),
        (b"not a checkpoint", "checkpoint.pt cannot be read"),
        ({"weights": torch.ones(1)}, "checkpoint.pt is not a checkpoint of torch_ref"),
        (Path("/"), "checkpoint.pt cannot be read (Weights only load failed"),
    ],
)
def test_bad_checkpoints_are_one_line(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError) as caught:
        load_checkpoint(path, new_state(TorchConfig()))
    assert str(caught.value).startswith(f"--resume {tmp_path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    batch = {"x": torch.ones(2, 3), "y": torch.zeros(2).long()}
    state = new_state(TorchConfig(optimizer="adam"))
    train_step(state.module, state.optimizer, None, [batch], World())
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    other = new_state(TorchConfig(optimizer="adam", amsgrad=True))
    with pytest.raises(InputError, match="missing bias: max_exp_avg_sq; missing weight: max_exp_avg_sq"):
        load_checkpoint(tmp_path / "checkpoint.pt", other)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    first = small(tmp_path / "run", epochs=2)
    training.main(first)
    with pytest.raises(TrainingError) as caught:
        training.main(small(tmp_path / "run", resume=first.output, epochs=4, lr=1e30))
    assert re.fullmatch(
        r"loss is (nan|inf) at step \d+; --detect-anomaly names the parameter and the replica, "
        r"and the example if each has its own loss; "
        r"its batch has the examples \d+(, \d+)*( and \d+ more)?; "
        rf"the last good checkpoint is {first.output}/checkpoint.pt; continue with --resume {first.output}",
        str(caught.value),
    )
    assert torch.load(Path(first.output) / "checkpoint.pt", weights_only=True)["step"] == 8


class Masked(nn.Module):
    """A model with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize("averaged", [False, True])
def test_buffers_may_be_infinite_and_parameters_may_not(averaged: bool, tmp_path: Path) -> None:
    def new() -> TrainState:
        model = Masked()
        optimizer = torch.optim.Adam(model.parameters())
        return TrainState(model, optimizer, None, averaged=averaged_model(model, 0.9 if averaged else None))

    path, state, batch = tmp_path / "checkpoint.pt", new(), {"x": torch.ones(2, 3), "y": torch.zeros(2).long()}
    train_step(state.module, state.optimizer, None, [batch], World())
    save_checkpoint(path, state)
    restored = new()
    load_checkpoint(path, restored)
    assert torch.equal(restored.module.mask, state.module.mask)
    weights = tmp_path / "weights.safetensors"
    save_weights(weights, state.module)
    load_weights(weights, new().module)
    moment = state.optimizer.state[state.module.fc.bias]["exp_avg_sq"]
    for tensor, value, name in [
        (state.module.mask, torch.nan, "mask"),
        (moment, torch.inf, "fc.bias: exp_avg_sq"),
        (state.module.fc.weight.data, -torch.inf, "fc.weight"),
    ]:
        tensor.view(-1)[0] = value
        with pytest.raises(TrainingError, match=f"^{name} is not finite at step 0$"):
            save_checkpoint(path, state)
        tensor.view(-1)[0] = 0.0
    state.module.fc.weight.data[0, 0] = -torch.inf
    with pytest.raises(InputError, match=r"fc.weight\[0, 0\] is -inf; must be finite"):
        save_weights(weights, state.module)
        load_weights(weights, new().module)


def test_weights_are_strict_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(path, nn.Sequential(nn.Linear(3, 2)))
    other = nn.ModuleDict({"0": nn.Linear(4, 2, bias=False), "1": nn.Linear(2, 2, bias=False)})
    with pytest.raises(InputError) as caught:
        load_weights(path, other)
    problems = "0.weight has shape (2, 3) and not (2, 4); left over 0.bias; missing 1.weight"
    assert str(caught.value) == f"--weights {path}: does not fit the model: {problems}"
    with pytest.raises(InputError, match="not a readable safetensors file"):
        load_weights(tmp_path / "none", other)


def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "start.safetensors")
    config = case(devices=1, seed=5, dtype="float32")
    save_weights(Path(path), models.build(config, datasets.load(config)))
    run = training.build(World(), case(devices=1, seed=3, weights=path, strategy="single"))
    expected = models.build(config, datasets.load(config))
    for name, value in run.state.module.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, expected.state_dict()[name].double())


@pytest.mark.parametrize(
    "changes",
    [
        {"log_gradients": ("lyers.*",)},
        {"model": "convnet", "hidden_sizes": (4,)},
        {"weights": "missing.safetensors"},
        {"freeze": ("lyers.*",)},
        {"global_batch_size": 15, "accumulation_steps": 2},
        {"comm_hook": "batched_powerSGD", "matrix_approximation_rank": 50},
        {"dataset": "npz", "data_path": "missing.npz"},
    ],
)
def test_a_run_that_is_refused_creates_nothing(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(InputError):
        training.main(small(tmp_path / "runs" / "a", **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_checkpoint_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def fill(self: Path, target: Path) -> Path:
        if target.name == "checkpoint.pt" and target.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fill)
    run = tmp_path / "run"
    with pytest.raises(TrainingError) as error:
        training.main(small(run))
    assert str(error.value) == (
        f"{run}/checkpoint.pt: cannot be written (no space left on device: make room); "
        f"the last good checkpoint is {run}/checkpoint.pt; continue with --resume {run}"
    )
    assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == 8
    assert not list(run.glob(f"*{UNFINISHED}"))


def test_records_are_on_the_disk_before_the_checkpoint_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path("/proc/self/fd", str(descriptor)).readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    training.main(small(tmp_path / "run"))
    kept = [name for name in synced if name in ("metrics.jsonl", f"checkpoint.pt{UNFINISHED}")]
    assert len(kept) > 2
    assert kept == ["metrics.jsonl", f"checkpoint.pt{UNFINISHED}"] * (len(kept) // 2)


def test_the_size_of_a_checkpoint_is_that_of_its_tensors() -> None:
    state = training.build(World(), case(optimizer="adam", ema_decay=0.9, strategy="single")).state
    parameters = list(state.module.parameters())
    counters = 4 * len(parameters)  # Adam counts the steps of each parameter in float32
    own = 8  # the average counts its updates
    assert checkpoint_size(state) == 4 * sum(p.nbytes for p in parameters) + counters + own  # with two moments, average
