"""Time of a message between N GPUs: rings over NVLink inside a node and over InfiniBand between nodes."""

import math
from dataclasses import dataclass

from jaxddp.config.hardware import (
    GPU,
    NCCL_BASE_SECONDS,
    NETWORK_SHARE,
    NETWORK_STEP_SECONDS,
    NVLINK_SHARE,
    NVLINK_STEP_SECONDS,
)

# Parts of a ring all-reduce, which reduces and then gathers, that each kind of message makes.
HALVES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}


@dataclass(frozen=True)
class Links:
    """Connections of the GPUs of a run.

    A message of B bytes takes, with g GPUs in each of m nodes and h = 2 for an all-reduce and 1 for half of one,

        h (g-1)/g B / NVLink  +  h (m-1)/m B/g / InfiniBand  +  latency

    The two parts run one after the other, where NCCL overlaps them to some degree.

    Attributes:
        gpu: kind of GPU.
        per_node: GPUs per node.
        nodes: number of nodes.
    """

    gpu: GPU
    per_node: int
    nodes: int = 1

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return self.per_node * self.nodes

    def seconds(self, kind: str, size: float) -> float:
        """Return the time of a message.

        Args:
            kind: "all-reduce", "all-gather", "reduce-scatter", ...
            size: bytes of the full array on each GPU, before it is reduced or after it is gathered.
        """
        halves, g, m = HALVES[kind], self.per_node, self.nodes
        if self.count == 1:
            return 0.0
        inside = halves * (g - 1) / g * size / (NVLINK_SHARE * self.gpu.nvlink)
        between = halves * (m - 1) / m * size / g / (NETWORK_SHARE * self.gpu.network)
        # Between nodes NCCL uses trees for short messages, whose depth grows as the logarithm.
        steps = halves * (g - 1) * NVLINK_STEP_SECONDS + halves * math.ceil(math.log2(m)) * NETWORK_STEP_SECONDS
        return inside + between + NCCL_BASE_SECONDS + steps


def links_of(gpu: GPU, count: int, per_node: int) -> Links:
    """Return the links of `count` GPUs, filling nodes of `per_node`.

    >>> from jaxddp.config.hardware import GPUS
    >>> [(links.per_node, links.nodes) for links in (links_of(GPUS["h100"], n, 8) for n in (1, 4, 32))]
    [(1, 1), (4, 1), (8, 4)]
    """
    inside = min(count, per_node)
    return Links(gpu, inside, count // inside)
