"""Recorded ranks whose batches differ in length are compared with the mean of the ranks' means, as DDP computes it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from jaxddp.parity import Recorder, compare_runs

SIZES = (4, 2)
STEPS = 3
NAMES = {"kernel": "weight"}


def examples(step: int, sizes: Sequence[int] = SIZES) -> list[np.ndarray]:
    """Return the examples of a step by rank; those of all ranks are the same for all sizes."""
    every = np.random.default_rng(step).normal(1.0, 1.0, (sum(SIZES), 3))
    return np.split(every, np.cumsum(sizes)[:-1])


def join_ranks(folder: Path) -> None:
    """Make the folders of ranks that were recorded one by one a recording of all of them."""
    (folder / "1/rank0").rename(folder / "0/rank1")
    for rank in range(2):
        path = folder / f"0/rank{rank}/run.jsonl"
        header, *steps = path.read_text().split("\n")
        path.write_text("\n".join([json.dumps({**json.loads(header), "world_size": 2}), *steps]))


def record_rank(rank: int, store: str, folder: Path) -> None:
    """Train one of torch's ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    _record(rank, folder)
    # The model is gone by now: it would end gloo's thread with the GIL held, for which that thread may wait.
    dist.destroy_process_group()


def _record(rank: int, folder: Path) -> None:
    inner = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.ones_(inner.weight)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(folder, STEPS)
    recorder.watch(model, optimizer)
    for step in range(STEPS):
        batch = torch.from_numpy(examples(step)[rank])
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(batch, loss)


def record_jax(folder: Path, *, sizes: Sequence[int] = SIZES, by_examples: bool = False, in_one: bool = False) -> Path:
    """Train on the ranks' batches, recorded as two ranks or as a program that has all examples.

    Args:
        by_examples: every example weighs the same.
    """
    import jax  # torch's ranks, which import this module, start faster without
    import optax

    gradient = jax.value_and_grad(lambda params, x: ((x @ params["kernel"]) ** 2).mean())
    shares = np.array(sizes) / sum(sizes) if by_examples else np.full(2, 0.5)
    params, tx = {"kernel": np.ones((3, 1))}, optax.sgd(0.1)
    opt_state = tx.init(params)
    recorders = [Recorder(folder / str(rank), STEPS) for rank in range(2 - in_one)]
    for recorder in recorders:
        recorder.watch(params)
    for step in range(STEPS):
        batches = examples(step, sizes)
        losses, locals_ = zip(*(gradient(params, x) for x in batches), strict=True)
        grads = jax.tree.map(lambda *x: sum(share * g for share, g in zip(shares, x, strict=True)), *locals_)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        shown: dict[str, Any] = {"grads": grads, "updates": updates, "params": params}
        for rank, recorder in enumerate(recorders):
            if in_one:
                recorder.step(np.concatenate(batches), shares @ np.array(losses), **shown)
            else:
                recorder.step(batches[rank], losses[rank], local_grads=locals_[rank], **shown)
    if not in_one:
        join_ranks(folder)
    return folder / "0"


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(record_rank, (str(folder / "store"), folder / "torch"), nprocs=2)
    return folder / "torch"


@pytest.mark.parametrize("in_one", [False, True], ids=["ranks", "one program"])
@pytest.mark.usefixtures("x64")
def test_the_mean_of_the_ranks_means_is_equal(in_one: bool, torch_run: Path, tmp_path: Path) -> None:
    report = compare_runs(torch_run, record_jax(tmp_path, in_one=in_one), NAMES)
    assert report.verdict == "equal", str(report)
    assert {"samples", "local_loss", "gradients", "update"} <= report.stages.keys()


@pytest.mark.parametrize("in_one", [False, True], ids=["ranks", "one program"])
@pytest.mark.usefixtures("x64")
def test_a_mean_over_all_examples_is_named(in_one: bool, torch_run: Path, tmp_path: Path) -> None:
    report = compare_runs(torch_run, record_jax(tmp_path, in_one=in_one, by_examples=True), NAMES)
    assert report.verdict == "different"
    causes = [one.cause for one in report.differences if one.stage == "gradients"]
    assert causes and causes[0] and causes[0].names == ("global_mean",), str(report)


@pytest.mark.usefixtures("x64")
def test_ranks_that_get_other_numbers_of_the_same_examples_differ(torch_run: Path, tmp_path: Path) -> None:
    for sizes in ((2, 4), (3, 3)):
        report = compare_runs(torch_run, record_jax(tmp_path / str(sizes), sizes=sizes), NAMES)
        (difference,) = report.differences
        assert difference.stage == "samples"
        assert difference.detail == f"the replicas have 4, 2 examples in torch, {sizes[0]}, {sizes[1]} in jax"
