"""SourceLine of a port at which its torch optimizer is made. Imports no jax."""

import contextlib
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

from torch.optim import Optimizer

from jaxddp.parity.operations import SourceLine, calling_lines, line_of_user
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.side import Source, make_side
from torch_ref.distributed import World


@dataclass(frozen=True)
class TorchOptimizerLine:
    """A job that returns the line at which the optimizer is made, the first of several.

    Attributes:
        source: model or port.
        world_size: always 1.
    """

    source: Source
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> SourceLine | None:
        """Return the line; None: unknown."""
        tell("the optimizer")
        lines: list[SourceLine | None] = []
        make = Optimizer.__init__

        @wraps(make)
        def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            lines.append(line_of_user(calling_lines()))
            make(self, *args, **kwargs)

        side = make_side(self.source, 1, "float64")
        with mock.patch.object(Optimizer, "__init__", noted), contextlib.suppress(Exception):
            if side.torch_step is not None:
                side.torch_step.configure(side.model)
            else:
                side.make_optimizer(side.model.parameters(), world)
        return lines[0] if lines else None
