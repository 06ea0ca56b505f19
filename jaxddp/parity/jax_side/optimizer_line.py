"""SourceLine of a port at which its optax optimizer is made."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import optax

from jaxddp.nn.any_model import transformation_of
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.operations import SourceLine, calling_lines, line_of_user
from jaxddp.parity.processes import Tell

_made: dict[int, tuple[Any, SourceLine]] = {}  # id of an `update` function -> the function, and the line that made it


def note_optimizers() -> None:
    """Note the user's line at which each optax transformation is made from now on, in this process."""
    make: Callable[..., Any] = optax.GradientTransformation.__new__

    @wraps(make)
    def noted(kind: type, init: Any, update: Any) -> Any:
        made = make(kind, init, update)
        if (line := line_of_user(calling_lines())) is not None:
            _made[id(update)] = update, line
        return made

    optax.GradientTransformation.__new__ = noted


@dataclass(frozen=True)
class JaxOptimizerLine:
    """A job that returns the line at which a port's optimizer is made.

    Attributes:
        case: model or port.
        start: initial weights of the reference.
        tensor: a parameter that the optimizer updates, by torch's name, where a step has several.
    """

    case: AnyCase
    start: Arrays
    tensor: str

    def run(self, tell: Tell) -> SourceLine | None:
        """Return the line; None: a built-in model, or an optimizer that is not made by optax's functions."""
        tell("flax_optimizer")
        port = getattr(self.case, "port", None)
        if port is None or port.flax_optimizer is None:
            return None
        with contextlib.suppress(Exception):  # it is told where the port runs
            made = (
                self._one_of_several() if port.torch_step else transformation_of(port.flax_optimizer, port.flax_model())
            )
            return _made.get(id(made.update), (None, None))[1]
        return None

    def _one_of_several(self) -> optax.GradientTransformation:
        side = side_of(self.case)
        params, step = side.from_torch(self.start)[0], side.replica_step
        assert isinstance(step, MultiLossStep), "a port with a torch_step"
        updated = ((side.to_torch({name: params[name] for name in tree.paths}), one) for tree, one in step.optimizers)
        return next(one for tensors, one in updated if self.tensor in tensors)
