"""Lines of a port at which its torch optimizer and its scheduler are made. Imports no jax."""

import contextlib
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.parity.operations import OptimizerLines
from jaxddp.parity.processes import Tell
from jaxddp.parity.torch_side.made_lines import noted
from jaxddp.parity.torch_side.side import Source, make_side
from jaxddp.parity.user_code.homes import line_of_function
from jaxddp.parity.user_code.line_values import LineValues
from jaxddp.parity.user_code.stated import returned_at
from torch_ref.distributed import World


@dataclass(frozen=True)
class TorchOptimizerLine:
    """A job that returns the lines at which an optimizer and its scheduler are made.

    Attributes:
        source: model or port.
        tensor: name of a parameter that the optimizer updates.
        step: step, from 0, whose rate is computed line by line; None: none.
        world_size: always 1.
    """

    source: Source
    tensor: str
    step: int | None = None
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> OptimizerLines:
        """Return the lines, those of the first optimizer if none updates the parameter."""
        tell("the optimizer")
        side = make_side(self.source, 1, "float64")
        with noted(Optimizer) as optimizers, noted(LRScheduler) as schedulers, contextlib.suppress(Exception):
            if side.torch_step is not None:
                side.torch_step.configure(side.model)
            else:
                side.make_optimizer(side.model.parameters(), world)
        parameter = dict(side.model.named_parameters()).get(self.tensor)
        holding = [x for x in optimizers if any(p is parameter for of in x[0].param_groups for p in of["params"])]
        if not optimizers:
            return OptimizerLines()
        optimizer, line = (*holding, *optimizers)[0]
        of_it = [(one, at) for one, at in schedulers if getattr(one, "optimizer", None) is optimizer]
        if not of_it:
            return OptimizerLines(line)
        scheduler, at = of_it[-1]  # the last: of a chain, what holds the others
        factor = next(iter(getattr(scheduler, "lr_lambdas", ())), None)
        function = line_of_function(factor)
        if factor is None or function is None or self.step is None:
            return OptimizerLines(line, at if function is None else returned_at(function))
        with LineValues() as values, contextlib.suppress(Exception):
            factor(self.step)
        return OptimizerLines(line, returned_at(function), values.numbers)
