"""The job that draws torch's initial weights, and says what its training loop does. Imports no jax."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from jaxddp.errors import InputError
from jaxddp.parity.held_types import HeldTypes
from jaxddp.parity.port import Facts, errors_located
from jaxddp.parity.port.draws import Draw
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import is_large_model
from jaxddp.parity.stored_tensors import StoredTensors, write_tensors
from jaxddp.parity.torch_side.draws import NotedDraws
from jaxddp.parity.torch_side.held_types import held_types, own_defaults
from jaxddp.parity.torch_side.side import BuiltIn, Source, TorchSide, make_side, side_of_port
from torch_ref.distributed import World
from torch_ref.losses import Batch


@dataclass(frozen=True)
class DrawWeights:
    """A job that draws a model's initial weights and returns them with the facts of its training loop.

    The first batch is made twice, to check that both are equal. Its loss is computed once, to see which dtypes it casts
    to and which random numbers it draws.

    Attributes:
        source: makes the model.
        dtype: dtype of the weights.
        path: new folder to write the weights to.
        seed: seed of torch's generator.
        world_size: always 1; rank 0 draws for all.
    """

    source: Source
    dtype: str
    path: Path
    seed: int = 0
    world_size: int = 1

    def run(
        self, world: World, tell: Tell
    ) -> tuple[StoredTensors, Facts, tuple[Draw, ...] | InputError, HeldTypes | None]:
        """Draw the weights; return them, the facts, the loss's draws or why it cannot be computed, and a port's types.

        The types are those that its torch half holds as written; None: a built-in model's.
        """
        tell("the port's file or torch_model")
        torch.manual_seed(self.seed)
        with own_defaults(self.source.name) as own:
            port = None if isinstance(self.source, BuiltIn) else self.source.port()
            side = make_side(self.source, 1, self.dtype) if port is None else side_of_port(port, 1, self.dtype)
        write_tensors(self.path, {name: x.detach().cpu().numpy() for name, x in side.model.state_dict().items()})
        tell("batch(0, 0)")
        batches: list[list[Batch]] = []
        with contextlib.suppress(Exception):  # the run reports the error
            batches += [next(side.batches(0, 1)) for _ in range(2)]
        if batches and not _same(*batches):
            raise InputError("batch(0, 0): returns other values at its second call; must depend only on step and rank")
        tell("torch_loss")
        draws = _draws_of(side, batches, self.source.name)
        facts = replace(side.facts, casts=tuple(sorted(side.casts)), moves_weights=_moved(side.model, self.path))
        tell("torch_optimizer")
        types = None if port is None else held_types(port, own, not is_large_model(StoredTensors(self.path)))
        return StoredTensors(self.path), facts, draws, types


def _moved(model: nn.Module, path: Path) -> bool:
    """Return whether parameters of a large model differ from those in a folder."""
    there, parameters = StoredTensors(path), model.named_parameters()
    return is_large_model(there) and any(not np.array_equal(x.detach().cpu().numpy(), there[n]) for n, x in parameters)


def _draws_of(side: TorchSide, batches: list[list[Batch]], name: str) -> tuple[Draw, ...] | InputError:
    """Return the draws of the loss for the first of these batches, or why it cannot be computed."""
    try:
        with errors_located(name), NotedDraws(side.model) as noted:
            _compute(side, batches[0][0])
    except InputError as error:  # the run reports it
        with contextlib.suppress(Exception):  # it may fail only under NotedDraws; compute it again to see its casts
            _compute(side, batches[0][0])
        return error
    return tuple(noted.draws)


def _compute(side: TorchSide, batch: Batch) -> None:
    """Compute the loss, or take its `torch_step`."""
    model = side.model
    if side.torch_step is None:
        side.loss_fn(model, batch)
    else:
        side.torch_step.losses(model, side.torch_step.configure(model), batch)


def _same(one: list[Batch], other: list[Batch]) -> bool:
    """Return whether two lists of micro-batches hold the same values; NaN equals NaN."""
    pairs = [(tensor, b[name]) for a, b in zip(one, other, strict=True) for name, tensor in a.items()]
    return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)
