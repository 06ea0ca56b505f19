"""Uneven inputs: torch's own join, and what it leaves to do."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jaxddp.config import TrainConfig
from torch_ref.distributed import World
from torch_ref.losses import Sums
from torch_ref.state import TrainState


def join(model: nn.Module, config: TrainConfig) -> AbstractContextManager[Any]:
    """In this context a rank may make fewer steps than others; with `--join`, and for DDP.

    Where it has come to the end it goes along with zeros in place of gradients, and leaves with the parameters
    and buffers of the rank that was the last to come (of several, the highest).

    Source: pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    if not config.join or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.join(divide_by_initial_world_size=config.divide_by_initial_world_size)


def catch_up(state: TrainState, sums: list[Sums], world: World) -> None:
    """Bring ranks that have made fewer steps to where the last one is; to be called after a `join`.

    torch leaves them with the optimizer's state, the schedule and the moving average of the last step
    that they made: in the next epoch they would make other parameters of the same gradients.

    Args:
        state: is changed.
        sums: of each step that this rank has made since all ranks were in step; zeros are added.
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
    """What of the state a join does not hand on."""
    parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "averaged": state.averaged}
    return {name: part.state_dict() for name, part in parts.items() if part is not None}
