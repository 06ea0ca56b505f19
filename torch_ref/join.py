"""Uneven inputs: torch's own join, and the state that it leaves behind."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.config import TrainerConfig
from torch_ref.distributed import World
from torch_ref.losses import Sums
from torch_ref.state import TrainState


def join(model: nn.Module, config: TrainerConfig) -> AbstractContextManager[Any]:
    """Return a context in which a DDP rank may take fewer steps than others; without `--join` it has no effect.

    A rank without further batches takes part with gradients of zero. At the end, all ranks receive the parameters
    and buffers of the rank that finished last (of several, the highest).

    Source: pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    if not config.join or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.join(divide_by_initial_world_size=config.divide_by_initial_world_size)


def catch_up(state: TrainState, sums: list[Sums], world: World) -> None:
    """Copy the state of the rank with the most steps to the others; call it after a `join`.

    torch's join leaves a rank with the optimizer state, schedule and moving average of its last step, so that in
    the next epoch the ranks would make different updates from the same gradients.

    Args:
        state: state of this rank, changed in place.
        sums: sums of this rank's steps since the ranks were last in step; sums of zero are appended.
        world: the ranks that train together.
    """
    steps = world.all_gather(torch.tensor(state.step, device=world.device)).tolist()
    last = max(range(world.world_size), key=lambda rank: (steps[rank], rank))
    if min(steps) == steps[last]:
        return
    zeros = {name: torch.zeros_like(value) for name, value in sums[-1].items()} if sums else {}
    content = world.broadcast_object({**_kept(state), "step": state.step, "zeros": zeros}, last)
    missing = content["step"] - state.step
    if missing:
        for name, of_last in content.items():
            if hasattr(getattr(state, name, None), "load_state_dict"):
                getattr(state, name).load_state_dict(of_last)
        state.step = content["step"]
        sums += [content["zeros"]] * missing


def _kept(state: TrainState) -> dict[str, Any]:
    """Return the parts of the state that a join does not copy."""
    parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "averaged": state.averaged}
    return {name: part.state_dict() for name, part in parts.items() if part is not None}
