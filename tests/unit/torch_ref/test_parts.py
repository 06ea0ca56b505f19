"""Parts of torch_ref: loader, losses, optimizers, models and flags."""

import dataclasses
import json
import math
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from jaxddp.config import TrainConfig
from jaxddp.config.choices import BELONGS_TO, OPTIMIZERS
from jaxddp.errors import InputError
from jaxddp.program import program_of
from jaxddp.tracking.run_folder import load_config
from tests.support.torch_cases import RANKS, case, small
from torch_ref import models, optim
from torch_ref import train as training
from torch_ref.config import TorchConfig
from torch_ref.devices import check_devices, num_replicas
from torch_ref.distributed import World
from torch_ref.loader import EvaluationBatches, Loader, epoch_indices
from torch_ref.losses import cross_entropy
from torch_ref.program import module_of


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("drop_last_batch", [False, True])
def test_loader_equals_torchs_dataloader(drop_last: bool, drop_last_batch: bool) -> None:
    config = TrainConfig(global_batch_size=6, drop_last=drop_last, drop_last_batch=drop_last_batch, seed=2)
    arrays = {"x": np.arange(23)}
    orders = []
    for rank in range(2):
        sampler = DistributedSampler(arrays["x"], 2, rank, seed=2, drop_last=drop_last)
        stock = DataLoader(arrays["x"], batch_size=3, sampler=sampler, drop_last=drop_last_batch)
        loader = Loader(arrays, config, num_replicas=2, ranks=[rank])
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            expected = [batch.tolist() for batch in stock]
            steps = [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(epoch)]
            assert steps == [[batch] for batch in expected]
            assert [2 * len(batch) for batch in expected] == [loader.examples_in(step) for step in range(len(expected))]
            orders.append(expected)
        assert loader.steps_per_epoch == len(expected)
        assert loader.examples_per_epoch == 2 * sum(map(len, expected))
    assert orders[0] != orders[1]  # set_epoch
    assert sorted(map(str, orders)) == sorted(set(map(str, orders)))
    if not drop_last_batch:
        shares = epoch_indices(23, config, num_replicas=2)
        assert shares.tolist() == [list(chain(*orders[0])), list(chain(*orders[2]))]


def test_loader_groups_micro_batches_by_optimizer_step() -> None:
    config = TrainConfig(global_batch_size=8, accumulation_steps=2, shuffle=False)
    loader = Loader({"x": np.arange(26)}, config, num_replicas=2, ranks=[0])
    steps = [[micro_batch["x"].tolist() for micro_batch in step] for step in loader.epoch(0)]
    assert steps == [[[0, 2], [4, 6]], [[8, 10], [12, 14]], [[16, 18], [20, 22]], [[24]]]
    assert [[m["x"].tolist() for m in step] for step in loader.epoch(0, start_step=2)] == steps[2:]
    assert len(loader.smallest_micro_batch()["x"]) == 1
    whole = Loader({"x": np.arange(26)}, dataclasses.replace(config, drop_last_batch=True), 2, ranks=[0])
    assert [[m["x"].tolist() for m in step] for step in whole.epoch(0)] == steps[:3]
    with pytest.raises(InputError, match="--global-batch-size 32: larger than the 26 examples"):
        Loader({"x": np.arange(26)}, TrainConfig(global_batch_size=32, drop_last_batch=True), 2, ranks=[0])


def test_evaluation_reads_every_example_once_at_each_pass() -> None:
    for world_size in (1, 2, 9):  # more ranks than examples
        worlds = [World(rank=rank, world_size=world_size) for rank in range(world_size)]
        ranks = [EvaluationBatches([{"x": i} for i in range(7)], TrainConfig(), world, 2) for world in worlds]
        for _ in range(2):
            batches = [list(of_rank) for of_rank in ranks]
            assert sorted(x for rank in batches for batch in rank for x in batch["x"].tolist()) == list(range(7))
            assert all(rank and len(batch["x"]) <= 2 for rank in batches for batch in rank)


def test_cross_entropy_sums_are_torchs_mean() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, 3).double(), torch.randint(3, (4, 5))
    labels[1, 2:] = -100
    sums = cross_entropy(nn.Identity(), {"x": logits, "y": labels})
    assert sums["count"] == 17
    assert sums["loss"] / sums["count"] == F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert sums["accuracy"] == (logits.argmax(-1) == labels).sum()


def test_warmup_cosine_follows_its_formula_without_a_warning() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    config = TrainConfig(schedule="warmup_cosine", lr=0.3, warmup_steps=4, min_lr=0.01)
    optimizer, scheduler = optim.from_config([parameter], config, total_steps=12)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rise = [0.3 * (1 / 3 + 2 / 3 * step / 4) for step in range(4)]
    fall = [0.01 + 0.29 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates == pytest.approx(rise + fall, abs=1e-15)
    with pytest.raises(InputError, match="--warmup-steps 4: must be below the run's 4 optimizer steps"):
        optim.from_config([parameter], config, total_steps=4)


def test_optimizers_get_the_options_that_were_set() -> None:
    values = {"lr": 0.5, "momentum": 0.25, "nesterov": True, "weight_decay": 0.125, "betas": (0.5, 0.75), "eps": 1e-3}
    values |= {"amsgrad": True, "alpha": 0.75, "centered": True, "lr_decay": 0.5, "initial_accumulator_value": 0.5}
    for name in OPTIMIZERS:
        takers = BELONGS_TO["optimizer"]
        chosen = {option: value for option, value in values.items() if name in takers.get(option, OPTIMIZERS)}
        optimizer, _ = optim.from_config([torch.zeros(1, requires_grad=True)], TrainConfig(optimizer=name, **chosen), 1)
        assert type(optimizer).__name__.lower() == name
        assert {option: optimizer.param_groups[0][option] for option in chosen} == chosen


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 7, 5, 3)])
def test_convnet_accepts_images_with_and_without_channels(shape: tuple[int, ...]) -> None:
    model = models.ConvNet(in_channels=shape[3] if len(shape) == 4 else 1, channels=(4, 6), num_classes=3)
    assert model(torch.rand(shape)).shape == (4, 3)


def test_batch_norm_on_a_single_example_is_refused_before_training() -> None:
    config = TorchConfig(dataset="names", model="char_mlp", global_batch_size=2, devices=2, platform="cpu")
    with pytest.raises(InputError, match="BatchNorm cannot train; choose another size, or --drop-last-batch"):
        training.build(World(world_size=2), config)


def test_batch_norm_on_a_single_pixel_is_refused_before_training(tmp_path: Path) -> None:
    x, y = np.zeros((4, 1, 1)), np.arange(4)
    np.savez(tmp_path / "pixels.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = TorchConfig(dataset="npz", data_path=str(tmp_path / "pixels.npz"), model="convnet", hidden_sizes=(4,))
    with pytest.raises(InputError, match="BatchNorm cannot train; choose another size, or --drop-last-batch"):
        training.build(World(), dataclasses.replace(config, global_batch_size=1, devices=1, platform="cpu"))


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        (
            {"sync_batch_norm": True, "model": "convnet"},
            {},
            "--sync-batch-norm: torch's SyncBatchNorm runs on GPUs only; on CPU --strategy",
        ),
        ({"devices": 3}, {}, "--global-batch-size 16: must be divisible by 3 replicas x 1 accumulation steps"),
        ({"devices": 4}, TORCHRUN, "--devices 4: torchrun started 2 processes"),
        ({"strategy": "single"}, TORCHRUN, "--strategy single: needs one process, torchrun started 2"),
        ({}, {"RANK": "0"}, "RANK is set, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not; set all of torchrun's"),
        ({}, {**TORCHRUN, "MASTER_PORT": ""}, "RANK is set, MASTER_PORT (empty) not; set all of torchrun's"),
        ({}, dict.fromkeys(TORCHRUN, ""), "RANK (empty), WORLD_SIZE (empty), LOCAL_RANK (empty), MASTER_ADDR"),
        ({}, {**TORCHRUN, "RANK": "2"}, "RANK 2: must be below WORLD_SIZE, which is 2"),
        ({}, {**TORCHRUN, "RANK": "9" * 5000}, f"RANK {'9' * 5000}: must be a number, at least 0"),
        ({}, {**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE two: must be a number, at least 0"),
    ],
)
def test_impossible_launches_are_refused_before_any_process_starts(
    changes: dict, environment: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        training.main(case(**changes))
    assert str(caught.value).startswith(message)


def test_a_resumed_run_may_use_another_number_of_processes_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    check_devices(case(resume="run"))
    assert num_replicas(case(resume="run")) == 4
    with pytest.raises(InputError, match="torchrun started 4 processes"):
        check_devices(case())


def test_unknown_strategies_get_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"--strategy manul: unknown; did you mean manual\?"):
        TorchConfig(strategy="manul")


def test_strategy_single_accepts_synchronised_batch_norm_on_cpu() -> None:
    check_devices(case(model="convnet", sync_batch_norm=True, strategy="single"))
    assert num_replicas(case(strategy="single")) == RANKS


def test_print_shards_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    training.main(case(num_examples=9, global_batch_size=6, shuffle=False, print_shards=True))
    assert "replica 1 | x2 x4 x6 | x8 x1*" in capsys.readouterr().out


def test_the_config_of_a_run_can_be_loaded(tmp_path: Path) -> None:
    config = small(tmp_path / "run", epochs=1)
    training.main(config)
    assert load_config(tmp_path / "run", TorchConfig) == config
    assert json.loads((tmp_path / "run" / "config.json").read_text())["strategy"] == "ddp"


@pytest.mark.parametrize(("dtype", "kept"), [("float32", torch.complex64), ("float64", torch.complex128)])
def test_complex_tensors_of_a_module_stay_complex(dtype: str, kept: torch.dtype) -> None:
    class Turned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.phase = nn.Parameter(torch.tensor([1 + 2j]))
            self.register_buffer("table", torch.tensor([3 - 4j]), persistent=False)

    module = module_of(program_of({"torch_model": Turned}), TorchConfig(dtype=dtype))
    phase, table = module.get_parameter("phase"), module.get_buffer("table")
    assert (phase.dtype, phase.item(), table.dtype, table.item()) == (kept, 1 + 2j, kept, 3 - 4j)
    assert str(module.get_parameter("weight").dtype) == f"torch.{dtype}"
