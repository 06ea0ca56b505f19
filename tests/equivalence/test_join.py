"""Uneven inputs against torch's own `join`: gradients, parameters and buffers after every step of several epochs."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from jaxddp.data.datasets import Dataset
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.nn import layers
from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.cases import Case
from jaxddp.parity.jax_side.checked_step import forget_programs
from jaxddp.parity.port import PortFile
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Tensors
from jaxddp.parity.torch_side.pool import TorchPool
from jaxddp.parity.torch_side.rank_recorder import to_numpy
from tests.support.cases import small_case
from tests.support.trajectories import Comparison, check_differs, check_equal, compare, run_jax
from torch_ref import models, optim
from torch_ref.distributed import World
from torch_ref.join import catch_up, join
from torch_ref.loader import Loader
from torch_ref.state import TrainState
from torch_ref.step import train_step

TOLERANCE = 1e-12  # float64; measured: up to 8.1e-15
FAULT = 1e-3  # smallest difference of a stage that a fault must cause; measured: from 0.05; ranks drift by 0.02
STAGES = ("gradients", "params", "buffers")
EPOCHS = 3
HERE = PortFile(__file__)

# Model, replicas, examples per replica and step, micro-batches per step, examples in all; in comments the examples
# of each replica in an epoch's last step.
KINDS: dict[str, tuple[str, int, int, int, int]] = {
    "smaller batches": ("char_mlp", 2, 8, 1, 25),  # 5 and 4 examples
    "smaller batches on 4": ("char_mlp", 4, 4, 1, 27),  # 3, 3, 3 and 2
    "fewer micro-batches": ("mlp", 2, 8, 2, 25),  # 4 + 1 and 4
    "fewer micro-batches on 4": ("mlp", 4, 4, 2, 25),  # 2 + 1 and three times 2
    "one has run out": ("mlp", 2, 4, 2, 17),  # 1 and none
    "two have run out": ("convnet", 4, 2, 1, 18),  # 1, 1, none and none
}


@dataclass(frozen=True)
class Uneven(Case):
    """Case with only `size` training examples."""

    size: int = 0

    def dataset(self) -> Dataset:
        probe = super().dataset()
        train = {name: array[: self.size] for name, array in probe.train.items()}
        return dataclasses.replace(probe, train=train)


@cache
def uneven(kind: str, **options: Any) -> Uneven:
    usual, world_size, per_replica, accumulation, size = KINDS[kind]
    model = options.pop("model", usual)
    sizes = {"global_batch_size": world_size * per_replica, "accumulation_steps": accumulation}
    steps = -(-size // (world_size * per_replica)) * EPOCHS
    case = small_case(model, "sgd", world_size, **{"steps": steps, "momentum": 0.9, "join": True, **sizes, **options})
    return Uneven(case.config, world_size, steps, case.ignored_labels, size)


@dataclass(frozen=True)
class Joined:
    """Job for torch's ranks: every epoch within DDP's own join, at whose end the other ranks catch up with the last.

    Each rank returns one pair per epoch: for every step it made, the gradients and parameters after the step and
    the buffers before its forward pass; and the parameters and buffers at the end of the epoch.
    """

    case: Uneven
    weights: Tensors
    catches_up: bool = True

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def source(self) -> PortFile:
        return HERE

    def run(self, world: World, tell: Tell) -> list[tuple[list[dict[str, Tensors]], dict[str, Tensors]]]:
        config, dataset = self.case.config, self.case.dataset()
        module = models.build(config, dataset).double()
        module.load_state_dict({name: torch.from_numpy(array) for name, array in self.weights.items()})
        model = DistributedDataParallel(module, process_group=world.group)
        optimizer, scheduler = optim.from_config(module.parameters(), config, self.case.steps)
        state = TrainState(module, optimizer, scheduler)
        begun: list[Tensors] = []
        module.register_forward_pre_hook(lambda *_: begun.append(buffers_of(module)))
        loader, epochs = Loader(dataset.train, config, self.world_size, [world.rank]), []
        for epoch in range(EPOCHS):
            steps, sums = [], []
            with join(model, config):
                for micro_batches in loader.epoch(epoch):
                    tell(f"step {state.step + 1}")
                    begun.clear()
                    sums.append(train_step(model, optimizer, scheduler, micro_batches, world))
                    state.step += 1
                    gradients = {name: to_numpy(p.grad) for name, p in module.named_parameters()}
                    steps.append({"gradients": gradients, "params": params_of(module), "buffers before": begun[0]})
            if self.catches_up:
                catch_up(state, sums, world)
                assert len(sums) == loader.steps_per_epoch
            epochs.append((steps, {"params": params_of(module), "buffers": buffers_of(module)}))
        return epochs


def params_of(module: torch.nn.Module) -> Tensors:
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def buffers_of(module: torch.nn.Module) -> Tensors:
    return {name: to_numpy(buffer) for name, buffer in module.named_buffers()}


def run_torch(case: Uneven, pool: TorchPool) -> Trajectory:
    """Return the trajectory of the ranks that made each step, which must be the same on all of them."""
    weights = case.initial_weights()
    ranks, records = pool.do(Joined(case, weights)), []
    for of_epoch in zip(*ranks, strict=True):
        of_ranks, ends = zip(*of_epoch, strict=True)
        count = max(map(len, of_ranks))
        for step in range(count):
            made = [steps[step] for steps in of_ranks if len(steps) > step]
            following = [{"buffers": steps[step + 1]["buffers before"]} for steps in of_ranks if len(steps) > step + 1]
            of_all = [{stage: record[stage] for stage in ("params", "gradients")} for record in made]
            records.append(same(of_all) | {"buffers": same(following or ends)["buffers"]})
        assert same(ends)["params"].keys() == same(made)["params"].keys()
        records[-1] |= same(ends)  # as DDP broadcasts them at the end of the join
    return Trajectory(weights, records)


def same(records: list[Any]) -> Any:
    """Return the first record; all others must equal it to the last bit."""
    for record in records[1:]:
        for stage, tensors in record.items():
            for name, array in tensors.items():
                np.testing.assert_array_equal(array, records[0][stage][name], f"{stage} {name}")
    return records[0]


@pytest.fixture(scope="module")
def torch_run(workers: Any) -> Any:
    """Return a function that runs a case in torch, each case once."""
    return cache(lambda case: run_torch(case, workers.torch))


def check(jax_run: Trajectory, torch_run: Trajectory) -> Comparison:
    return compare(jax_run, torch_run, TOLERANCE, STAGES)


# As long as every replica has examples, both divisors are equal.
CASES = [(kind, divide) for kind in KINDS for divide in (True, False) if "run out" in kind or divide]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("kind", "divide_by_initial_world_size"), CASES)
def test_every_step_equals_torchs_join(kind: str, divide_by_initial_world_size: bool, torch_run: Any) -> None:
    case = uneven(kind, divide_by_initial_world_size=divide_by_initial_world_size)
    check_equal((run_jax(case, case.initial_weights()), torch_run(case)), TOLERANCE, STAGES)


def test_another_divisor_is_detected(torch_run: Any) -> None:
    case, other = (uneven("one has run out", divide_by_initial_world_size=divide) for divide in (True, False))
    comparison = check(run_jax(other, case.initial_weights()), torch_run(case))
    check_differs(comparison, "gradients", FAULT, step=3)


@pytest.mark.large
def test_buffers_of_another_rank_are_detected(torch_run: Any) -> None:
    """Take the buffers of rank 0, which would be right without a join."""
    case = uneven("smaller batches")
    batches = [batch._replace(buffers_of=None) for batch in case.batches()]
    comparison = check(run_jax(case, case.initial_weights(), batches=batches), torch_run(case))
    check_differs(comparison, "buffers", FAULT, step=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["smaller batches", "fewer micro-batches on 4"])
def test_padding_counted_as_examples_is_detected(kind: str, torch_run: Any) -> None:
    case = uneven(kind)

    def all_valid(batch: MicroBatches) -> MicroBatches:
        return batch._replace(last={**batch.last, "valid": np.ones_like(batch.last["valid"])})

    batches = [all_valid(batch) if "valid" in batch.last else batch for batch in case.batches()]
    comparison = check(run_jax(case, case.initial_weights(), batches=batches), torch_run(case))
    check_differs(comparison, "gradients", FAULT)


@pytest.mark.large
def test_padding_counted_in_batch_norm_alone_is_detected(torch_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.BatchNorm, "valid", property(lambda self: None, lambda self, value: None), raising=False)
    case = uneven("smaller batches")
    forget_programs()
    comparison = check(run_jax(case, case.initial_weights()), torch_run(case))
    forget_programs()
    assert comparison.worst["gradients"].value > FAULT and comparison.worst["buffers"].value > FAULT


@pytest.mark.parametrize("catches_up", [True, False])
def test_torch_ranks_drift_apart_unless_they_catch_up(catches_up: bool, pool: TorchPool) -> None:
    """A rank that joined early keeps an older momentum, which DDP does not broadcast; in jaxddp all replicas step."""
    case = uneven("one has run out")
    ranks = pool.do(Joined(case, case.initial_weights(), catches_up))
    drift = []
    for epoch in range(EPOCHS):
        one, other = (of_rank[epoch][0][0]["params"] for of_rank in ranks)  # after the epoch's first step
        drift.append(max(np.abs(one[name] - other[name]).max() for name in one))
    assert drift == [0, 0, 0] if catches_up else drift[0] == 0 and min(drift[1:]) > FAULT


# ---- loss_normalization="global", against one torch process on the whole batch


def whole(case: Uneven) -> Trajectory:
    """Run one torch process on all replicas' examples, without padding."""
    config, dataset, weights = case.config, case.dataset(), case.initial_weights()
    model = models.build(config, dataset).double()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    optimizer, scheduler = optim.from_config(model.parameters(), config, case.steps)
    loader, records = Loader(dataset.train, config, case.world_size, range(case.world_size)), []
    for epoch in range(EPOCHS):
        for micro_batches in loader.epoch(epoch):
            train_step(model, optimizer, scheduler, micro_batches, World(), loss_normalization="global")
            gradients = {name: to_numpy(p.grad) for name, p in model.named_parameters()}
            records.append({"gradients": gradients, "params": params_of(model), "buffers": buffers_of(model)})
    return Trajectory(weights, records)


MASKED = {"ignored_labels": 0.4}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fewer micro-batches on 4", {}),
        ("one has run out", {"ignored_labels": 0.0}),  # the only example keeps its label
        ("smaller batches on 4", {"sync_batch_norm": True}),
        # In the last micro-batch one replica has one example, the other none.
        pytest.param("fewer micro-batches", {"model": "convnet", "sync_batch_norm": True}, marks=pytest.mark.large),
    ],
)
def test_global_normalization_equals_one_torch_process_on_the_whole_batch(kind: str, options: dict[str, Any]) -> None:
    """Combine uneven batches, ignored labels, accumulation and synchronised BatchNorm."""
    case = uneven(kind, loss_normalization="global", **MASKED | options)
    check_equal((run_jax(case, case.initial_weights()), whole(case)), TOLERANCE, STAGES)


@pytest.mark.large
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("fewer micro-batches on 4", {"loss_normalization": "ddp"}),
        ("smaller batches on 4", {"sync_batch_norm": False}),
    ],
)
def test_a_mean_of_means_and_local_batch_norm_differ_from_the_whole_batch(kind: str, fault: dict[str, Any]) -> None:
    options: dict[str, Any] = {"loss_normalization": "global", **MASKED}
    if "sync_batch_norm" in fault:
        options["sync_batch_norm"] = True
    case = uneven(kind, **options)
    comparison = check(run_jax(uneven(kind, **options | fault), case.initial_weights()), whole(case))
    assert comparison.worst["gradients"].value > FAULT
