"""Twins of a port's arrays and of its random numbers, found before anything runs.

Where names do not map, the order of use proposes a table.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.nn.linen import LinenFunctional, functional_of
from jaxddp.parity.convert import Converter, NamesError
from jaxddp.parity.flax_side.draws import draws_of
from jaxddp.parity.flax_side.layers import listening_linen, listening_nnx
from jaxddp.parity.port import Port, errors_located
from jaxddp.parity.port.draws import Draw
from jaxddp.parity.processes import Tell
from jaxddp.parity.question import PortQuestion
from jaxddp.parity.torch_side.layers import Calls, order_of_torch


@dataclass(frozen=True)
class Found:
    """What `Twins` finds.

    Attributes:
        without_twin: what has no twin, in a line; "" if every array has one.
        names: a table of names that may help.
        draws: the draws of the flax loss, or why it cannot be computed.
    """

    without_twin: str = ""
    names: dict[str, str] = field(default_factory=dict)
    draws: tuple[Draw, ...] | str = ""


@dataclass(frozen=True)
class Twins:
    """A job that finds the torch tensor of each flax array, and the draws of the loss.

    Attributes:
        case: a port.
    """

    case: PortQuestion

    def run(self, tell: Tell) -> Found:
        """Map the arrays and trace the loss."""
        tell("flax_model or flax_loss")
        port = self.case.port
        model = port.flax_model()
        functional = functional_of(model, port.flax_loss, lambda: port.micro_batches(0, 0, "flax")[0])
        module = port.torch_model()
        shapes = {name: tuple(value.shape) for name, value in (functional.params | functional.buffers).items()}
        try:
            Converter(module, shapes, port.names, port.transpose_kernel, port.no_twin)
        except NamesError as error:
            tell("flax_loss and torch_loss, to see the order of the layers")
            names = error.proposed(_order_of_flax(port, model, functional), order_of_torch(port, module))
            return Found(error.says, names)
        try:
            with errors_located(self.case.name):
                return Found(draws=draws_of(port))
        except InputError as error:  # it is told where the port runs
            return Found(draws=str(error))


def _order_of_flax(port: Port, model: Any, functional: Functional | LinenFunctional) -> Sequence[str]:
    """Return the flax layers in the order in which their calls return; () if the loss cannot be computed."""
    calls = Calls()
    try:
        with ExitStack() as stack:
            if isinstance(model, nnx.Module):
                bound: Any = listening_nnx(model, functional.params, functional.buffers, calls, stack)
            else:
                bound = listening_linen(port, model, functional.params, functional.buffers, calls, stack)
            port.flax_loss(bound, jax.tree.map(jax.numpy.asarray, port.micro_batches(0, 0, "flax")[0]))
    except Exception:  # it is told where the port runs
        return ()
    return calls.order
