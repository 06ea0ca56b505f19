"""One rank of torch's DistributedDataParallel, which trains on request; needs no jax.

The loop is what a user writes: the data are preloaded as tensors, unless a DataLoader is asked for.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from benchmarks import models_torch
from benchmarks.race import Turn
from benchmarks.workloads import Workload
from jaxddp.config.options import Platform
from torch_ref.config import TorchConfig
from torch_ref.devices import local_device
from torch_ref.distributed import World, process_group

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TorchJob:
    """A training that the ranks build.

    Attributes:
        workload: what to train.
        weights: initial weights, by torch's names and in torch's layout.
        compiled: use torch.compile.
        data_loader: draw batches from torch's DataLoader and DistributedSampler.
    """

    workload: Workload
    weights: Mapping[str, np.ndarray]
    compiled: bool = False
    data_loader: bool = False


class Examples(Dataset[Batch]):
    """Examples as dictionaries of tensors."""

    def __init__(self, tensors: Batch):
        self._tensors = tensors

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in self._tensors.items()}

    def __len__(self) -> int:
        return len(self._tensors["y"])


class TorchDDP:
    """Model, optimizer, data and training loop of one rank."""

    def __init__(self, job: TorchJob, world: World):
        self._world = world
        self._size = job.workload.batch_size // world.world_size
        self._data = models_torch.tensors(job.workload, job.workload.arrays())
        self._module = models_torch.build(job.workload, job.weights).to(world.device)
        self._start = {name: value.clone() for name, value in self._module.state_dict().items()}
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self._model: Any = DistributedDataParallel(self._module, device_ids, process_group=world.group)
        if job.compiled:
            self._model = torch.compile(self._model)
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=job.workload.lr, fused=True)
        if job.data_loader:
            examples = Examples(self._data)
            self._sampler: DistributedSampler[Any] = DistributedSampler(examples, world.world_size, world.rank)
            pinned = world.device.type == "cuda"
            self._loader = DataLoader(examples, self._size, sampler=self._sampler, pin_memory=pinned)
            self._epoch = self._loaded_epoch
        else:
            self._data = {name: tensor.to(world.device) for name, tensor in self._data.items()}
            self._epoch = self._preloaded_epoch

    def train(self, steps: int) -> Turn:
        """Train from the initial state; see `benchmarks.race.Contender`."""
        self._module.load_state_dict(self._start)
        self._optimizer.state.clear()
        self._model.train()
        batches = chain.from_iterable(map(self._epoch, count()))
        losses: list[Tensor] = []
        batch = next(batches)
        dist.barrier(self._world.group)  # start together
        started = time.perf_counter()
        while True:
            losses.append(self._step(batch))
            if len(losses) == steps:
                break
            batch = next(batches)
        losses[-1].item()  # wait for the device
        seconds = time.perf_counter() - started
        return Turn(seconds, self._world.all_reduce(torch.stack(losses), "mean").tolist())

    def _step(self, batch: Batch) -> Tensor:
        labels = batch["y"].flatten()
        self._optimizer.zero_grad()
        logits = self._model(**{name: tensor for name, tensor in batch.items() if name != "y"}).flatten(0, -2)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        self._optimizer.step()
        (logits.detach().argmax(-1) == labels).float().mean()  # accuracy, which the others compute too
        return loss.detach()

    def _preloaded_epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield batches in DistributedSampler's order."""
        order = torch.randperm(len(self._data["y"]), generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[: -len(order) % self._world.world_size]])
        for indices in order[self._world.rank :: self._world.world_size].to(self._world.device).split(self._size):
            yield {name: tensor[indices] for name, tensor in self._data.items()}

    def _loaded_epoch(self, epoch: int) -> Iterator[Batch]:
        self._sampler.set_epoch(epoch)
        for batch in self._loader:
            yield {name: tensor.to(self._world.device, non_blocking=True) for name, tensor in batch.items()}


def threads(world_size: int) -> int:
    """Return the threads of each rank, so that all cores are busy and none has two threads if possible.

    >>> threads(1) == os.cpu_count(), threads(4096)
    (True, 1)
    """
    return max(1, (os.cpu_count() or 1) // world_size)


def serve(rank: int, world_size: int, platform: Platform, store: str, connection: Connection) -> None:
    """Answer the parent's requests until it closes the connection: a `TorchJob` to build, or (its number, steps)."""
    torch.set_num_threads(threads(world_size))
    tqdm.set_lock(threading.RLock())  # tqdm's default is a semaphore, which a killed rank would leave behind
    torch._logging.set_logs(all=logging.ERROR)  # torch.compile warns that it leaves out the profiler's marks
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # costs a copy only
    device = local_device(TorchConfig(platform=platform), rank)
    jobs: list[TorchDDP] = []
    try:
        with process_group(rank, world_size, device, dist.FileStore(store, world_size)) as world:
            while True:
                connection.send(_answer(connection.recv(), jobs, world))
    except (EOFError, BrokenPipeError):
        pass  # the race has ended


def _answer(request: Any, jobs: list[TorchDDP], world: World) -> Any:
    try:
        if isinstance(request, TorchJob):
            jobs.append(TorchDDP(request, world))
            return len(jobs) - 1
        number, steps = request
        return jobs[number].train(steps)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {first_line}"
