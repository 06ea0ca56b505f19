"""A ring all-reduce of torch's point-to-point messages, and torch's collectives; this knows no jax."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from examples.ring.inputs import COLLECTIVES, buffers, given
from torch_ref.config import TorchConfig
from torch_ref.distributed import World


@dataclass
class Ring:
    """The ranks in a ring, each of which speaks to its right neighbour only.

    Attributes:
        world: the ranks.
        sent: bytes that this one has sent.
    """

    world: World
    sent: int = 0

    def walk(self, buffer: Tensor) -> Tensor:
        """What this rank holds at first and after each step, (2W - 1, W chunks, chunk)."""
        chunks = self.in_chunks(buffer)
        held = [chunks.clone()]
        for step in range(self.world.world_size - 1):
            received = self.to_the_right(chunks[self.chunk(-step)])
            chunks[self.chunk(-step - 1)] += received
            held.append(chunks.clone())
        for step in range(self.world.world_size - 1):
            received = self.to_the_right(chunks[self.chunk(1 - step)])
            chunks[self.chunk(-step)] = received
            held.append(chunks.clone())
        return torch.stack(held)

    def in_chunks(self, buffer: Tensor) -> Tensor:
        """A buffer (n,) as W chunks of one size, the last filled up with zeros."""
        size = -(-len(buffer) // self.world.world_size)
        return F.pad(buffer, (0, size * self.world.world_size - len(buffer))).view(-1, size)

    def chunk(self, offset: int) -> int:
        """The number of the chunk that is so far from this rank's own."""
        return (self.world.rank + offset) % self.world.world_size

    def to_the_right(self, chunk: Tensor) -> Tensor:
        """Send to rank r + 1, and receive from r - 1."""
        received = torch.empty_like(chunk)
        messages = [
            dist.P2POp(dist.isend, chunk.contiguous(), self.chunk(1), self.world.group),
            dist.P2POp(dist.irecv, received, self.chunk(-1), self.world.group),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        self.sent += chunk.numel() * chunk.element_size()
        return received


def talk(world: World, config: TorchConfig) -> dict[str, dict]:
    """A rank's part of what `in_jax.ring` and `in_jax.talk` return, as "ring" and "collectives"."""
    return {"ring": _ring(world), "collectives": _collectives(world)}


def _ring(world: World) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, of_all in buffers(world.world_size).items():
        buffer = torch.from_numpy(of_all[world.rank]).to(world.device)
        ring = Ring(world)
        steps = ring.walk(buffer)
        found[name] = {
            "steps": steps,
            "ring": steps[-1].flatten()[: len(buffer)],
            "all_reduce": world.all_reduce(buffer.clone()),
            "bytes": torch.tensor(ring.sent),
        }
    return found


def _collectives(world: World) -> dict[str, Tensor]:
    mine = {
        name: torch.tensor(of_all[world.rank], device=world.device) for name, of_all in given(world.world_size).items()
    }
    return {name: getattr(world, name)(mine[name], **options) for name, options in COLLECTIVES.items()}
