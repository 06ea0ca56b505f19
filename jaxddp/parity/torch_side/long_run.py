"""Run only torch's optimizer, for many steps. Imports no jax."""

from dataclasses import dataclass
from pathlib import Path

import torch

from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Records, Tensors
from jaxddp.parity.torch_side.side import Source, load_state, make_side
from torch_ref.distributed import World


@dataclass(frozen=True)
class TorchUpdates:
    """A job that lets the optimizer take many steps on gradients that are used again and again.

    Attributes:
        source: makes model and optimizer.
        steps: optimizer steps of the check; schedules need their number.
        weights: state_dict to start from.
        gradients: folder of records with "gradients".
        factors: a factor of the gradients for each step.
        world_size: always 1.
    """

    source: Source
    steps: int
    weights: Arrays
    gradients: Path
    factors: tuple[float, ...]
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> Tensors | None:
        """Return the parameters after the last step; None if a scheduler changes the optimizer's rate."""
        tell("the optimizer alone")
        side = make_side(self.source, self.steps, "float64")
        load_state(side.model, self.weights)
        optimizer, scheduler = side.make_optimizer(side.model.parameters(), world)
        if scheduler is not None:
            return None
        parameters = dict(side.model.named_parameters())
        clip = side.facts.clip_grad_norm if side.facts.clips_inside else None  # else the records hold clipped ones
        records = Records([self.gradients])
        given = [{name: torch.from_numpy(x) for name, x in record["gradients"].items()} for record in records]
        for step, factor in enumerate(self.factors):
            for name, gradient in given[step % len(given)].items():
                parameters[name].grad = gradient * factor
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
            optimizer.step()
        return {name: x.detach().numpy() for name, x in parameters.items()}
