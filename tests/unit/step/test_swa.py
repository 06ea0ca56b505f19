"""Stochastic weight averaging against torch.optim.swa_utils: averaged parameters, rates and BatchNorm statistics."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim.swa_utils import SWALR, update_bn

from jaxddp import DistributedDataParallel, Loader, optim, schedules
from jaxddp.checkpoint import Checkpoints
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.errors import InputError
from jaxddp.nn.torch_weights import to_torch
from jaxddp.step import moving_average
from jaxddp.step.moving_average import EqualAverage
from tests.support.step_cases import CLASSES, FEATURES, Net, dealt, first
from torch_ref.state import TrainState, averaged_model

TOLERANCE = 1e-12  # of a tensor's largest value, float64; measured: 3.3e-15
FAULT = 1e-3  # smallest with a planted fault: 0.073 (a count that is half as large)
EPOCHS, START, ANNEAL, STEPS_PER_EPOCH = 7, 2, 3, 4
LR, SWA_LR = 0.1, 0.05


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc2 = torch.nn.Linear(FEATURES, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.bn(self.fc1(x))))


def squared(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(32, FEATURES)) + 1, "y": rng.normal(size=(32, CLASSES))}


def schedule() -> Any:
    main = schedules.exponential(LR, 0.9)
    late = schedules.swa(float(main(START)), SWA_LR, ANNEAL, "linear")
    return schedules.by_epoch(schedules.sequential([main, late], [START]), STEPS_PER_EPOCH)


def trainer(world_size: int = 2, **options: Any) -> DistributedDataParallel:
    options = {"swa": True, "dtype": "float64"} | options
    return DistributedDataParallel(
        Net("sync"), optim.sgd(schedule(), momentum=0.9), squared, replicas=first(world_size), **options
    )


def loader(ddp: DistributedDataParallel) -> Loader:
    return Loader(data(), ddp.replicas, global_batch_size=8, shuffle=False)


def trained(ddp: DistributedDataParallel, resume: Path | None = None) -> Any:
    """Train, and average the epochs from START on; if there is a folder, through a checkpoint after each epoch."""
    state = ddp.init()
    checkpoints = resume and Checkpoints(resume)
    if checkpoints:
        checkpoints.create()
    for epoch in range(EPOCHS):
        for batches in loader(ddp).epoch(0):
            state, _ = ddp.steps(state, batches)
        if epoch >= START:
            state = ddp.update_average(state)
        if checkpoints:
            checkpoints.save(ddp.unsharded(state))
            checkpoints.wait()
            state = ddp.place_state(checkpoints.restore(ddp.unsharded(ddp.init())))
    ddp.verify(state)
    return state


def of_jax(ddp: DistributedDataParallel, resume: Path | None = None) -> dict[str, np.ndarray]:
    state = trained(ddp, resume)
    state = ddp.update_bn(ddp.averaged(state), loader(ddp).epoch(0))
    ddp.verify(state)
    params, buffers = ddp.values(state)
    return to_torch({**params, **buffers})


def of_torch() -> dict[str, np.ndarray]:
    model = TorchNet().double()
    start = trainer()
    arrays = to_torch({k: v for part in start.values(start.init()) for k, v in part.items()})
    model.load_state_dict({name: torch.tensor(x) for name, x in arrays.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    averaged = averaged_model(model, None, swa=True)
    assert averaged is not None
    state = TrainState(model, optimizer, None, averaged=averaged)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = [{k: torch.tensor(x[i : i + 8]) for k, x in data().items()} for i in range(0, 32, 8)]
    for epoch in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            squared(model, batch).mean().backward()
            optimizer.step()
            state.advance(skipped=False)
        if epoch >= START:
            averaged.update_parameters(model)
        if epoch == START:
            scheduler = SWALR(optimizer, SWA_LR, ANNEAL, "linear")
        scheduler.step()
    update_bn([batch["x"] for batch in batches], averaged)
    return {name: x.numpy() for name, x in averaged.module.state_dict().items()}


def deviation(ours: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(ours[name] - truth[name]).max() / np.abs(truth[name]).max()) for name in truth)


@pytest.mark.parametrize("sharded", [False, True])
def test_averages_rates_and_statistics_equal_torchs(sharded: bool, tmp_path: Path, x64: None) -> None:
    ours = of_jax(trainer(shard_optimizer=sharded), tmp_path if sharded else None)
    assert deviation(ours, of_torch()) <= TOLERANCE


def changed(count: int, average: EqualAverage, params: Any) -> EqualAverage:
    """Average with a count that is off; by 1, the start weights are in it."""
    off = average.n_averaged + count
    return EqualAverage(
        average.n_averaged + 1, jax.tree.map(lambda a, p: a + (p - a) / (off + 1), average.params, params)
    )


def exponential(average: EqualAverage, params: Any) -> EqualAverage:
    moved = moving_average.moving_average(average.params, params, 0.9, average.n_averaged == 0)
    return EqualAverage(average.n_averaged + 1, moved)


FAULTS: dict[str, Callable[..., EqualAverage]] = {
    "start weights in the average": partial(changed, 1),
    "count half as large again": lambda average, params: changed(average.n_averaged // 2, average, params),
    "exponential average": exponential,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches_another_average(fault: str, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxddp.step.between_epochs.equal_average", FAULTS[fault])
    assert deviation(of_jax(trainer()), of_torch()) > FAULT


def test_the_comparison_catches_the_statistics_of_the_steps(x64: None) -> None:
    truth, ddp = of_torch(), trainer()
    state = trained(ddp)
    kept = {k: v for part in ddp.values(ddp.averaged(state)) for k, v in part.items()}
    assert deviation(to_torch(kept), truth) > FAULT


def test_nothing_of_what_was_there_before_is_in_the_first_average() -> None:
    average = moving_average.equal_average(EqualAverage(jnp.int32(0), {"w": jnp.array(jnp.inf)}), {"w": jnp.array(0.1)})
    assert (int(average.n_averaged), average.params["w"]) == (1, jnp.float32(0.1))


@pytest.mark.parametrize("keep_buffers", ["rank0", "local"])
def test_every_micro_batch_of_every_replica_counts_the_same_and_padding_does_not(keep_buffers: str, x64: None) -> None:
    def padded(x: Any) -> Any:
        return jnp.tanh(x).sum(-1)

    model = Net("local", dropout=0.5)
    ddp = DistributedDataParallel(
        model,
        optim.sgd(),
        lambda model, batch: padded(model(batch["x"])).sum(-1),
        dtype="float64",
        replicas=first(2),
        keep_buffers=keep_buffers,
        swa=True,
    )
    batches = dealt(2, 3, (4, 4, 2))
    valid = np.ones((2, 3, 2))
    valid[1, 2] = 0  # a micro-batch of padding alone
    valid[0, 1, 1] = 0
    head = {"x": batches.head["x"], "valid": np.ones((2, 3, 2, 4))}
    given = MicroBatches(head, {"x": batches.last["x"], "valid": valid})
    state = ddp.update_bn(ddp.init(), [ddp.replicas.shard(given)])
    params, buffers = ddp.values(state)
    means, variances = [], []
    for x, counts in ((head["x"], head["valid"]), (given.last["x"][:, :, None], valid[:, :, None])):
        for micro, count in zip(x.reshape(-1, *x.shape[3:]), counts.reshape(-1, counts.shape[-1]), strict=True):
            if count.any():
                z = (micro[count > 0] @ params["fc1.kernel"] + params["fc1.bias"]).reshape(-1, 5)
                means.append(z.mean(0))
                variances.append(z.var(0, ddof=1))
    assert int(buffers["bn.num_batches_tracked"]) == len(means) == 17
    np.testing.assert_allclose(buffers["bn.mean"], np.mean(means, 0), 1e-12)
    np.testing.assert_allclose(buffers["bn.var"], np.mean(variances, 0), 1e-12)


def test_what_has_no_average_or_no_statistics_is_refused() -> None:
    ddp = DistributedDataParallel(Net(), optim.sgd(), squared, replicas=first(2), swa=True)
    with pytest.raises(InputError, match=r"^averaged: nothing is averaged yet"):
        ddp.averaged(ddp.init())
    with pytest.raises(InputError, match=r"^update_bn: the model has no BatchNorm"):
        ddp.update_bn(ddp.init(), [])
    plain = DistributedDataParallel(Net("local"), optim.sgd(), squared, replicas=first(2))
    with pytest.raises(InputError, match=r"^update_average: no equal average is kept"):
        plain.update_average(plain.init())
    with pytest.raises(InputError, match=r"^update_bn: needs at least one batch"):
        plain.update_bn(plain.init(), [])
    with pytest.raises(InputError, match=r"^swa: cannot be combined with ema_decay"):
        DistributedDataParallel(Net(), optim.sgd(), squared, replicas=first(2), swa=True, ema_decay=0.9)
