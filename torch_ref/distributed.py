"""Ranks that train together, and collectives between them, under the names of torch.distributed."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# DDP would import this later, when its default arguments would keep the group and its threads alive until
# Python exits, where a thread that still frees a tensor aborts the process.
import torch.distributed.nn.functional
from torch import Tensor

from jaxddp.errors import PATIENCE, telling

CPU = torch.device("cpu")
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # then divided by W
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class World:
    """A process group, seen from one of its ranks; W is the world size.

    Attributes:
        rank: number of this process in the group, 0 .. W-1.
        world_size: W, number of processes.
        device: device of this rank's replica.
        group: the processes; None: all of them, or only this one if W is 1.

    >>> World().all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce the values of all ranks in place, with the result on every rank: y = x_0 + x_1 + ... + x_{W-1}.

        Args:
            op: sum | mean | min | max | product.
        """
        if self.world_size > 1:
            dist.all_reduce(tensor, REDUCTIONS[op], group=self.group)
        return self._averaged(tensor, op)

    def reduce(self, tensor: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
        """Reduce the values of all ranks in place, with the result on rank `dst`; the others keep their values."""
        value = tensor.clone()
        if self.world_size > 1:
            dist.reduce(tensor, group_dst=dst, op=REDUCTIONS[op], group=self.group)
        if self.rank == dst:
            return self._averaged(tensor, op)
        return tensor.copy_(value)  # gloo leaves partial sums in it

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Send the value of rank `src` to every rank, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self.group, group_src=src)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather the values of all ranks, (W, *shape), on every rank."""
        if self.world_size == 1:
            return torch.stack([tensor])
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return torch.stack(gathered)

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor:
        """Gather the values of all ranks, (W, *shape), on rank `dst`; the others get zeros."""
        if self.world_size == 1:
            return torch.stack([tensor])
        gathered = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        dist.gather(tensor, gathered if self.rank == dst else None, group=self.group, group_dst=dst)
        return torch.stack(gathered)

    def scatter(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Send slice r of rank `src`'s tensor (W, ...) to rank r."""
        slices = list(tensor.contiguous().unbind())
        received = torch.empty_like(slices[0])
        if self.world_size > 1:
            dist.scatter(received, slices if self.rank == src else None, group=self.group, group_src=src)
            return received
        return slices[0]

    def reduce_scatter(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce slice r of all ranks' tensors (W, ...) onto rank r: the first half of an all-reduce.

        Args:
            op: sum | mean.
        """
        slices = list(tensor.contiguous().unbind())
        received = torch.empty_like(slices[0])
        if self.world_size > 1:
            dist.reduce_scatter(received, slices, REDUCTIONS[op], group=self.group)
            return self._averaged(received, op)
        return slices[0]

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send slice r of every rank's tensor (W, ...) to rank r: a transposition of ranks and slices."""
        received = torch.empty_like(tensor)
        if self.world_size > 1:
            dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
            return received
        return tensor

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Send rank `src`'s value, any object that can be pickled, to every rank."""
        objects = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(objects, group=self.group, group_src=src)
        return objects[0]

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        if self.world_size > 1:
            dist.barrier(group=self.group)

    def _averaged(self, tensor: Tensor, op: str) -> Tensor:
        return tensor.div_(self.world_size) if op == "mean" else tensor  # gloo has no AVG


def distributed_optim() -> ModuleType:
    """Import torch.distributed.optim on first use: it takes a second, and warns that it uses torch.jit."""
    world, dist.group.WORLD = dist.group.WORLD, None  # a default argument would keep the group alive, as above
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module("torch.distributed.optim")
    finally:
        dist.group.WORLD = world


@contextlib.contextmanager
def process_group(rank: int, world_size: int, device: torch.device, store: dist.Store | None = None) -> Iterator[World]:
    """Create the process group of a run, with NCCL between GPUs and Gloo between CPU processes; destroy it on exit.

    Args:
        rank: number of this process.
        world_size: number of processes.
        device: device of this rank's replica.
        store: store through which the ranks connect; None: MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    >>> with process_group(0, 1, torch.device("cpu"), dist.HashStore()) as world:
    ...     dist.get_backend(), world.world_size
    ('gloo', 1)
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions rounds to 10 bits
    backend = "nccl" if on_gpu else "gloo"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if store is None else "the launcher"
    who = f"rank {rank} of {world_size}"
    with telling(lambda seconds: f"{who} has waited {seconds:.0f} s for the others, to meet at {address}", PATIENCE):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, device_id=device if on_gpu else None
        )
    try:
        yield World(rank, world_size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
