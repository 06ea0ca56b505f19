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
    """A job that returns the line at which an optimizer is made.

    Attributes:
        source: model or port.
        tensor: name of a parameter that the optimizer updates.
        world_size: always 1.
    """

    source: Source
    tensor: str
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> SourceLine | None:
        """Return the line, that of the first optimizer if none updates the parameter; None: unknown."""
        tell("the optimizer")
        made: list[tuple[Optimizer, SourceLine | None]] = []
        make = Optimizer.__init__

        @wraps(make)
        def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            made.append((self, line_of_user(calling_lines())))
            make(self, *args, **kwargs)

        side = make_side(self.source, 1, "float64")
        with mock.patch.object(Optimizer, "__init__", noted), contextlib.suppress(Exception):
            if side.torch_step is not None:
                side.torch_step.configure(side.model)
            else:
                side.make_optimizer(side.model.parameters(), world)
        parameter = dict(side.model.named_parameters()).get(self.tensor)
        lines = [line for one, line in made if any(x is parameter for of in one.param_groups for x in of["params"])]
        return next(iter([*lines, *(line for _, line in made)]), None)
