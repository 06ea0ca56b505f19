"""The ranks that train together: who they are, and what they tell each other."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# DDP would import this later, and its default arguments would keep the group, and its threads, to the
# end of Python, where a thread that still frees a tensor aborts the process.
import torch.distributed.nn.functional
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """A process group, seen from one of its ranks. Below, W is the world size.

    Attributes:
        rank: this process's number in the group, 0 .. W-1.
        world_size: W.
        device: where this rank's replica lives.
        group: the processes; None: all of them, or this one alone if W is 1.

    >>> World().all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place: y = x_0 + x_1 + ... + x_{W-1}, on each of them."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Rank `src`'s value, in place, on every rank."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self.group, group_src=src)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's value, (W, *shape), on each of them."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(gathered, tensor, group=self.group)
        else:
            gathered = [tensor]
        return torch.stack(gathered)


@contextlib.contextmanager
def process_group(rank: int, world_size: int, device: torch.device, store: dist.Store | None = None) -> Iterator[World]:
    """Join the ranks of a run: NCCL between GPUs, Gloo between CPU processes.

    Args:
        store: where the ranks find each other; None: MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    >>> with process_group(0, 1, torch.device("cpu"), dist.HashStore()) as world:
    ...     dist.get_backend(), world.world_size
    ('gloo', 1)
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions rounds to 10 bits
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=device if on_gpu else None
    )
    try:
        yield World(rank, world_size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
