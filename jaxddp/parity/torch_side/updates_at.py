"""Updates of a port's torch optimizer at chosen steps of its schedule, on made gradients. Imports no jax."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.rate_curves import UPDATES, TorchRates, at, made_gradients, places_of
from jaxddp.parity.torch_side.rates import optimizer_of
from jaxddp.parity.torch_side.side import Source, load_state, make_side
from torch_ref.distributed import World

COUNT = "step"  # in the states of torch's optimizers


@dataclass(frozen=True)
class UpdatesAt:
    """A job that computes updates from one state and one gradient, with the optimizer's counts set to some steps.

    Attributes:
        source: model or port.
        weights: state_dict to start from.
        rates: torch's rates, and the other numbers of its groups.
        steps: the steps, ascending.
        run_steps: steps of the check's run, for which its schedules are made.
        world_size: always 1.
    """

    source: Source
    weights: Arrays
    rates: TorchRates
    steps: tuple[int, ...]
    run_steps: int
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> dict[str, np.ndarray]:
        """Return the updates of some elements of each parameter that an optimizer holds, (steps, elements)."""
        tell("the optimizer at chosen steps")
        side = make_side(self.source, self.run_steps, "float64")
        load_state(side.model, self.weights)
        optimizer, _ = optimizer_of(side, world)
        names = {id(parameter): name for name, parameter in side.model.named_parameters()}
        held = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        places = {name: places_of(parameter.numel(), len(held)) for name, parameter in held.items()}
        norm = side.facts.clip_grad_norm if side.facts.clips_inside else None
        for number in range(UPDATES - 1):
            self._set(optimizer, number)
            _update(optimizer, held, number, norm)
        state, rows = copy.deepcopy(dict(optimizer.state)), list[dict[str, np.ndarray]]()
        for step in self.steps:
            self._set(optimizer, step)
            _restore(optimizer.state, state, step)
            updates = _update(optimizer, held, UPDATES - 1, norm)
            rows.append({name: updates[name].reshape(-1)[where].numpy() for name, where in places.items()})
        return {name: np.stack([row[name] for row in rows]) for name in held}

    def _set(self, optimizer: Any, step: int) -> None:
        """Give each group the numbers that its schedulers give it at a step."""
        for number, group in enumerate(optimizer.param_groups):
            now = {
                name: float(at(curve, np.asarray([step]))[0])
                for name, curve in {"lr": self.rates.lr[number], **self.rates.others[number]}.items()
            }
            betas = [now.pop(name) for name in sorted(now) if name.startswith("beta")]
            group.update(now | ({"betas": tuple(betas)} if betas else {}))


def _update(optimizer: Any, held: Mapping[str, nn.Parameter], number: int, norm: float | None) -> dict[str, Tensor]:
    """Take a step with made gradients, and take it back; return the updates."""
    learning: Sequence[nn.Parameter] = [parameter for parameter in held.values() if parameter.requires_grad]
    gradients = made_gradients({name: tuple(parameter.shape) for name, parameter in held.items()}, number)
    for name, parameter in held.items():
        parameter.grad = torch.from_numpy(gradients[name]).to(parameter) if parameter.requires_grad else None
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(learning, norm)
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    optimizer.step()
    updates = {name: parameter.detach() - before[name] for name, parameter in held.items()}
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.copy_(before[name])
    return updates


def _restore(state: Mapping[Any, Any], saved: Mapping[Any, Any], step: int) -> None:
    """Give the parameters' states the values that were saved, with their counts at a step."""
    places = zip(state.values(), saved.values(), strict=True)
    for of_parameter, before in places:
        for name, value in before.items():
            if name == COUNT:
                of_parameter[name] = torch.full_like(value, step) if isinstance(value, Tensor) else step
            else:
                of_parameter[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
