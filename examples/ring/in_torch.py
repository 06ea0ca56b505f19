"""A ring all-reduce made of torch's point-to-point messages, and torch's collectives; needs no jax."""

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
    """A ring of ranks, in which each rank sends to its right neighbour only.

    Attributes:
        world: the ranks.
        sent: bytes that this rank has sent.
    """

    world: World
    sent: int = 0

    def walk(self, buffer: Tensor) -> Tensor:
        """Return this rank's chunks at the start and after each of 2 (W-1) steps, (2W - 1, W chunks, chunk)."""
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
        """Split a buffer (n,) into W chunks of equal size, the last one padded with zeros."""
        size = -(-len(buffer) // self.world.world_size)
        return F.pad(buffer, (0, size * self.world.world_size - len(buffer))).view(-1, size)

    def chunk(self, offset: int) -> int:
        """Return the number of the chunk `offset` places after this rank's chunk, modulo W."""
        return (self.world.rank + offset) % self.world.world_size

    def to_the_right(self, chunk: Tensor) -> Tensor:
        """Send a chunk to rank r + 1, and receive one from rank r - 1."""
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
    """Return this rank's part of the results of `in_jax.ring` and `in_jax.talk`, as "ring" and "collectives"."""
    return {"ring": _ring(world), "collectives": _collectives(world)}


def _ring(world: World) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name, of_all in buffers(world.world_size).items():
        buffer = torch.from_numpy(of_all[world.rank]).to(world.device)
        ring = Ring(world)
        steps = ring.walk(buffer)
        results[name] = {
            "steps": steps,
            "ring": steps[-1].flatten()[: len(buffer)],
            "all_reduce": world.all_reduce(buffer.clone()),
            "bytes": torch.tensor(ring.sent),
        }
    return results


def _collectives(world: World) -> dict[str, Tensor]:
    mine = {
        name: torch.tensor(of_all[world.rank], device=world.device) for name, of_all in given(world.world_size).items()
    }
    return {name: getattr(world, name)(mine[name], **options) for name, options in COLLECTIVES.items()}
