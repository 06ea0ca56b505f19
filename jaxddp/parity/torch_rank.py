"""One rank of torch, in a process of its own: takes jobs, returns what it saw. Knows no jax."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from jaxddp.parity.torch_side import TorchSide, TorchSource
from torch_ref.distributed import World, process_group
from torch_ref.losses import Batch, Sums
from torch_ref.step import global_count, train_step

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Job:
    """A rank's share of a case.

    Attributes:
        source: model, loss, optimizer, normalisation.
        dtype: of parameters, buffers and inputs.
        world_size: ranks 0 .. world_size - 1 take part.
        weights: state_dict to start from.
        steps: for each step this rank's micro-batches.
    """

    source: TorchSource
    dtype: str
    world_size: int
    weights: Arrays
    steps: list[list[Arrays]]


def serve(rank: int, size: int, store_file: str, connection: Connection) -> None:
    """Answer jobs until None comes: ("done", records) or ("failed", traceback)."""
    torch.set_num_threads(1)
    with process_group(rank, size, torch.device("cpu"), dist.FileStore(store_file, size)) as everyone:
        # Every process has to help to make a group, also those outside of it.
        groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        connection.send(("ready", None))
        while (job := connection.recv()) is not None:
            try:
                world = World(rank, job.world_size, everyone.device, groups[job.world_size])
                connection.send(("done", _run(job, world)))
            except Exception:
                connection.send(("failed", traceback.format_exc()))


def _run(job: Job, world: World) -> list[dict[str, Arrays]]:
    side = job.source.torch_side(len(job.steps))
    model = side.model.to(getattr(torch, job.dtype)).train()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in job.weights.items()})
    ddp = DistributedDataParallel(model, process_group=world.group)
    recorder = _Recorder(model, world, side)
    ddp.register_comm_hook(recorder, _recording_hook)
    optimizer, scheduler = side.make_optimizer(model.parameters())
    records = []
    for arrays in job.steps:
        micro_batches = [_to_batch(micro_batch) for micro_batch in arrays]
        recorder.start(micro_batches)
        train_step(
            ddp,
            optimizer,
            scheduler,
            micro_batches,
            world,
            loss_normalization=side.loss_normalization,
            clip_grad_norm=side.clip_grad_norm,
            loss_fn=recorder.loss_fn,
        )
        records.append(recorder.record())
    return records


class _Recorder:
    """Listens to a step: the losses, the gradients before and after DDP's all-reduce, the new state."""

    def __init__(self, model: nn.Module, world: World, side: TorchSide):
        self.model = model
        self.world = world
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._loss_fn = side.loss_fn
        self._global = side.loss_normalization == "global"

    def start(self, micro_batches: Sequence[Batch]) -> None:
        self.local: Arrays = {}
        self.reduced: Arrays = {}
        self._losses: list[Sums] = []
        self._total = float(global_count(micro_batches, self.world)) if self._global else None

    def loss_fn(self, model: nn.Module, batch: Batch) -> Sums:
        sums = self._loss_fn(model, batch)
        self._losses.append({name: value.detach() for name, value in sums.items()})
        return sums

    def record(self) -> dict[str, Arrays]:
        mine = {"local_loss": {"loss": self._local_loss()}, "local_gradients": self.local}
        if self.world.rank > 0:
            return mine
        state = {name: _to_numpy(value) for name, value in self.model.state_dict().items()}
        gradients = {name: _to_numpy(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        return {
            **mine,
            "gradients": self.reduced,
            "clipped_gradients": gradients,
            "params": {name: state[name] for name in self.names.values()},
            "buffers": {name: value for name, value in state.items() if name not in self.names.values()},
        }

    def _local_loss(self) -> np.ndarray:
        if self._total is not None:
            return np.asarray(sum(float(s["loss"]) for s in self._losses) * self.world.world_size / self._total)
        return np.asarray(np.mean([float(s["loss"] / s["count"]) for s in self._losses]))


def _recording_hook(recorder: _Recorder, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook, with an eye on what goes in and what comes out."""
    names = [recorder.names[id(parameter)] for parameter in bucket.parameters()]
    recorder.local |= {name: _to_numpy(value) for name, value in zip(names, bucket.gradients(), strict=True)}

    def keep(future: torch.futures.Future[Tensor]) -> Tensor:
        recorder.reduced |= {name: _to_numpy(value) for name, value in zip(names, bucket.gradients(), strict=True)}
        return future.value()

    assert recorder.world.group is not None
    return allreduce_hook(recorder.world.group, bucket).then(keep)


def _to_batch(arrays: Arrays) -> dict[str, Any]:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return {name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()}


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().clone().numpy()
