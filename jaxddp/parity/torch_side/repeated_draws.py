"""See which draws of a port's torch loss give the same numbers again. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from jaxddp.parity.port.draws import DrawnSource
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.draws import KINDS, NotedDraws
from jaxddp.parity.torch_side.side import make_side
from torch_ref.distributed import World

STEPS = 2


@dataclass(frozen=True)
class RepeatedDraws:
    """A job that tells which draws of a torch loss are the same in two steps.

    Attributes:
        source: a port whose losses draw random numbers.
        world_size: always 1.
    """

    source: DrawnSource
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> tuple[bool, ...]:
        """Compute the loss of two steps with torch's own numbers; return whether each draw repeats itself."""
        tell("random numbers")
        side = make_side(self.source.source, STEPS, "float64")
        numbers = []
        for micro_batches in islice(side.batches(0, 1), STEPS):
            with _Numbers(side.model) as noted:
                side.loss_fn(side.model, micro_batches[0])
            numbers.append(noted.numbers)
        return tuple(torch.equal(first, second) for first, second in zip(*numbers, strict=False))


class _Numbers(NotedDraws):
    """Context manager that keeps the numbers of the draws.

    Attributes:
        numbers: what each draw has drawn.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.numbers: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep what it draws."""
        count = len(self.draws)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.draws) > count and func.overloadpacket.__name__ in KINDS:
            drawn = result[1] if isinstance(result, tuple) else result  # native_dropout: (output, mask)
            self.numbers.append(drawn.detach().clone())
        return result
