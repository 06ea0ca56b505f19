"""Run only a port's optimizer, for many steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.checked_step import side_of
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Records, Tensors
from jaxddp.state import Params


@dataclass(frozen=True)
class JaxUpdates:
    """A job that lets the optimizer take many steps; see `jaxddp.parity.torch_side.long_run.TorchUpdates`.

    Attributes:
        case: a port without a `torch_step`.
        start: initial weights of the reference.
        gradients: folder of records with the stage that the optimizer gets.
        factors: a factor of the gradients for each step.
    """

    case: AnyCase
    start: Arrays
    gradients: Path
    factors: tuple[float, ...]

    def run(self, tell: Tell) -> Tensors:
        """Return the parameters after the last step, under torch's names."""
        tell("the optimizer alone")
        with jax.enable_x64(True):
            side = side_of(self.case)
            step = side.replica_step
            assert not isinstance(step, MultiLossStep), "a port without a torch_step"
            optimizer = step.optimizer

            @jax.jit
            def update(params: Params, opt_state: Any, gradients: Params, factor: float) -> tuple[Params, Any]:
                scaled = {name: factor * x for name, x in gradients.items()}
                updates, opt_state = optimizer.update(scaled, opt_state, params)
                return optax.apply_updates(params, updates), opt_state

            params, _ = side.from_torch(self.start)
            zeros = {name: 0 * x for name, x in self.start.items()}
            records = Records([self.gradients])
            given = [side.from_torch(Joined(record[side.given], zeros), adds=False)[0] for record in records]
            opt_state = optimizer.init(params)
            for number, factor in enumerate(self.factors):
                params, opt_state = update(params, opt_state, given[number % len(given)], factor)
            return side.to_torch(jax.device_get(params))
