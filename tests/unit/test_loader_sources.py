"""Sources in both loaders: the same examples, augmented alike, for any number of replicas, processes and workers."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.config import TrainConfig
from jaxddp.data.sources import as_source
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError, TrainingError
from jaxddp.loader import Loader
from tests.support.ragged import Ragged, augment, by_length, pad
from torch_ref.loader import Loader as TorchLoader

Examples = dict[int, list[float]]  # by index, in one epoch
GLOBAL_BATCH = 12


OPTIONS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "index": {"shuffle": "index"},
    "sampler": {"sampler": by_length},
    "in order, without repetitions": {"shuffle": False, "join": True},
}


def jaxs(
    world_size: int, epoch: int, start: int = 0, ranks: Any = None, accumulation: int = 1, **options: Any
) -> list[list[list[Any]]]:
    """Return (id, noise, ids without padding) of the examples: [step][rank][example]."""
    replicas = VirtualReplicas(world_size)
    replicas.local_ranks = list(range(world_size)) if ranks is None else ranks
    loader = Loader(
        Ragged(), replicas, global_batch_size=GLOBAL_BATCH, accumulation_steps=accumulation, seed=3,
        augment=augment, collate=pad, **options,
    )  # fmt: skip
    steps = []
    for batch in loader.host_batches(epoch, start):
        parts = [] if batch.head is None else [
            {name: x[:, :, i] for name, x in batch.head.items()} for i in range(batch.head["id"].shape[2])
        ]  # fmt: skip
        steps.append([
            [example for part in [*parts, batch.last] for example in examples({k: x[rank, 0] for k, x in part.items()})]
            for rank in range(len(replicas.local_ranks))
        ])  # fmt: skip
    return steps


def torchs(world_size: int, epoch: int, rank: int, start: int = 0, accumulation: int = 1, **options: Any) -> Any:
    """Return the same of one rank: [step][example]."""
    settings = {name: options.pop(name) for name in ("shuffle", "join") if name in options}
    config = TrainConfig(
        global_batch_size=GLOBAL_BATCH, accumulation_steps=accumulation, seed=3, dtype="float64",
        shuffle=settings.get("shuffle") is not False, join=settings.get("join", False),
    )  # fmt: skip
    if settings.get("shuffle") == "index":
        object.__setattr__(config, "shuffle", "index")
    loader = TorchLoader(Ragged(), config, world_size, [rank], augment=augment, collate=pad, **options)
    steps = loader.epoch(epoch, start)
    return [[x for part in step for x in examples({k: y.numpy() for k, y in part.items()})] for step in steps]


def examples(batch: dict[str, np.ndarray]) -> list[Any]:
    kept = batch.get("valid", np.ones(len(batch["id"]))) > 0
    rows = zip(batch["id"], batch["noise"], batch["ids"], kept, strict=True)
    return [(int(i), float(noise), ids[ids >= 0].tolist()) for i, noise, ids, valid in rows if valid]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_loaders_give_each_rank_the_same_augmented_examples(kind: str, accumulation: int) -> None:
    options = {**OPTIONS[kind], "accumulation": accumulation}
    ours = jaxs(3, epoch=1, **options)
    assert all(ids == [i] * (1 + i % 5) for step in ours for rank in step for i, _, ids in rank)
    for rank in range(3):
        theirs = torchs(3, epoch=1, rank=rank, **options)
        assert [step[rank] for step in ours][: len(theirs)] == theirs
        assert torchs(3, epoch=1, rank=rank, start=2, **options) == theirs[2:]
    assert jaxs(3, epoch=1, start=2, **options) == ours[2:]
    # Another process, which has some of the replicas, reads their examples alone.
    assert jaxs(3, epoch=1, ranks=[2, 0], **options) == [[step[2], step[0]] for step in ours]
    assert jaxs(3, epoch=0, **options) != ours
    # Another number of replicas deals the same examples, augmented alike, to the same steps.
    one = jaxs(1, epoch=1, **options)
    assert [sorted(x for rank in step for x in rank) for step in ours][:4] == [sorted(step[0]) for step in one][:4]


def test_workers_give_the_same_as_none() -> None:
    assert jaxs(2, epoch=1, accumulation=2, num_workers=2, timeout=60) == jaxs(2, epoch=1, accumulation=2)


def by_rank(example: Any, rng: np.random.Generator) -> Any:
    """Draw as augmentation with a generator of the process does: in the order of reading."""
    return example | {"noise": GENERATOR.standard_normal()}


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(("size", "join", "more"), [(8, False, 0), (8, True, 0), (11, True, 1)])
def test_torchs_loader_reads_each_example_once(size: int, join: bool, more: int) -> None:
    """And one more for the shapes of the micro-batch of a rank that has no examples left."""
    read: list[int] = []

    def augment(example: Any, rng: np.random.Generator) -> Any:
        read.append(int(example["x"]))
        return example

    options: dict[str, Any] = {"global_batch_size": 4, "accumulation_steps": 2, "shuffle": False, "join": join}
    data = [{"x": index} for index in range(size)]
    loader = TorchLoader(data, TrainConfig(**options), 2, [1], augment=augment)
    for _ in (0, 1):
        read.clear()
        assert [*loader.epoch(0)]
        assert sorted(read) == [0] * more + [*range(1, size, 2)]
        more = 0


def test_a_killed_worker_is_not_an_error_of_the_code_that_runs_when_torch_notices() -> None:
    killed = "DataLoader worker (pid 7) is killed by signal: Killed."

    def augment(example: Any, rng: np.random.Generator) -> Any:
        raise RuntimeError(killed)

    loader = TorchLoader([{"x": 0}] * 4, TrainConfig(global_batch_size=4), 1, [0], augment=augment)
    with pytest.raises(TrainingError, match=re.escape(f"training data: {killed[:-1]}; the workers were reading")):
        next(loader.epoch(0))
    killed = "mine"
    with pytest.raises(InputError, match=r"augment: example \d: RuntimeError: mine"):
        next(loader.epoch(0))


def test_augmentation_that_depends_on_the_order_of_reading_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "augment", by_rank)
    ours = jaxs(3, epoch=1)
    theirs = torchs(3, epoch=1, rank=1)
    assert [[x[0] for x in step[1]] for step in ours] == [[x[0] for x in step] for step in theirs]
    assert [step[1] for step in ours] != theirs


def test_batches_padded_by_collate_take_few_shapes_and_a_dispatch_each() -> None:
    loader = Loader(Ragged(), VirtualReplicas(2), global_batch_size=6, augment=augment, collate=pad, sampler=by_length)
    of_source = as_source(Ragged(), augment=augment, collate=pad)
    same = Loader(of_source, VirtualReplicas(2), global_batch_size=6, sampler=by_length, seed=7)
    assert same.steps_per_dispatch == 1 and same.source.seed == 7 and same.source.augment is augment
    shapes = {batch.last["ids"].shape for batch in loader.host_batches(0)}
    assert loader.steps_per_dispatch == 1 and len(shapes) > 1
    assert {shape[3] for shape in shapes} == {2, 4, 6}


def test_the_loader_counts_the_seconds_for_which_steps_wait_for_examples() -> None:
    class Slow(Ragged):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return {"id": index}

    loader = Loader(Slow(), VirtualReplicas(2), global_batch_size=10, steps_per_dispatch=1)
    started = time.perf_counter()
    for _ in loader.host_batches(0):
        time.sleep(0.05)
    assert 50 * 0.002 <= loader.waited < time.perf_counter() - started - 5 * 0.05 + 0.001


def test_a_sampler_whose_epochs_differ_in_length_is_refused() -> None:
    def growing(epoch: int, seed: int, size: int) -> np.ndarray:
        return np.arange(20 + epoch)

    ours = Loader({"x": np.zeros(30)}, VirtualReplicas(2), global_batch_size=4, sampler=growing)
    theirs = TorchLoader({"x": np.zeros(30)}, TrainConfig(global_batch_size=4), 2, [0], sampler=growing)
    assert (ours.steps_per_epoch, ours.examples_per_epoch) == (theirs.steps_per_epoch, theirs.examples_per_epoch)
    for loader in (ours, theirs):
        with pytest.raises(InputError, match=r"^sampler: epoch 2 has 22 indices, and epoch 0 20; each epoch must"):
            next(iter(loader.epoch(2)))


TWENTY_GIGABYTES = """
import sys, time
from jaxddp.data import token_file
from jaxddp.data.sources import as_source
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.loader import Loader

replicas, started = VirtualReplicas(2), time.perf_counter()
source = as_source(token_file(sys.argv[1], 1024, stride=128))
source.digest()
loader = Loader(source, replicas, global_batch_size=64)
loader.smallest_batch()
batches = loader.host_batches(0)
next(batches)
seconds = time.perf_counter() - started
for _ in range(50):
    next(batches)
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]  # getrusage: of the parent
print(len(source), seconds, int(peak) / 2**20)
"""


@pytest.mark.large
def test_84_million_windows_of_20_gigabytes_start_within_seconds_and_fit_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, 20 * 2**30)  # sparse
    printed = subprocess.check_output([sys.executable, "-c", TWENTY_GIGABYTES, str(path)], text=True, timeout=60)
    windows, seconds, gigabytes = map(float, printed.split())
    assert windows > 83e6
    assert seconds < 5  # measured: 1.5
    assert gigabytes < 2  # measured: 0.6


IN_TORCH = """
import json, os, signal, sys, time
import numpy as np, torch
from jaxddp.config import TrainConfig
from jaxddp.data.sources import as_source
from torch_ref.loader import Loader

class Data:
    def __len__(self): return 16
    def __getitem__(self, index):
        if index == 7: how()
        return {"x": index}

def augment(example, rng): return example | {"noise": rng.standard_normal()}

def batches(workers):
    loader = Loader(Data(), TrainConfig(global_batch_size=4), 1, [0], augment=augment, num_workers=workers, timeout=3)
    return [[float(x) for x in (*step["x"], *step["noise"])] for epoch in (0, 1) for (step,) in loader.epoch(epoch)]

how = lambda: None
assert batches(2) == batches(0)
for how in (lambda: 1 // 0, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(10)):
    try:
        batches(2)
    except Exception as error:
        print(type(error).__name__, str(error), flush=True)
assert "jax" not in sys.modules
"""


@pytest.mark.large
def test_workers_of_torchs_loader_give_the_same_and_fail_in_a_line() -> None:
    """In a process without jax, as torch_ref's are: these workers are forks."""
    result = subprocess.run([sys.executable, "-c", IN_TORCH], capture_output=True, text=True, timeout=60, check=False)
    raised, killed, hung = result.stdout.splitlines() or [result.stderr] * 3
    assert raised == "InputError training data: example 7: ZeroDivisionError: integer division or modulo by zero"
    reading = r"; the workers were reading the examples (7, \d+|\d+, 7)"
    assert re.fullmatch(
        rf"TrainingError training data: DataLoader worker .*(Killed|exited unexpectedly){reading}", killed
    )
    assert re.fullmatch(rf"TrainingError training data: DataLoader timed out after 3 seconds{reading}", hung)
    assert result.returncode == 0, result.stderr
