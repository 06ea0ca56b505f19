"""What a variant of a step changes on torch's side, in addition to weights and batch. Imports no jax."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from jaxddp.errors import reason
from jaxddp.parity.torch_side.rank_recorder import HasState
from jaxddp.parity.torch_side.side import TorchSide
from torch_ref.distributed import World
from torch_ref.losses import Batch

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


def raised(side: TorchSide, micro_batches: Sequence[Batch], world: World) -> str:
    """Return what the loss raises for a rank's examples, or for another rank's, without any other effect.

    Returns:
        The error in a line; "": no rank's loss raises.
    """
    why = ""
    if side.torch_step is None:
        before = [(buffer, buffer.clone()) for buffer in side.model.buffers()]
        try:
            with torch.no_grad():
                for batch in micro_batches:
                    side.loss_fn(side.model, batch)
                for buffer, value in before:
                    buffer.copy_(value)
        except Exception as error:
            why = f"torch_loss raises {type(error).__name__}: {reason(error)}"
    fails = torch.tensor(float(bool(why)))
    dist.all_reduce(fails, group=world.group)
    return why or ("torch_loss raises on another rank" if fails else "")


def scale_first_moments(optimizer: HasState, factor: float) -> None:
    """Multiply an optimizer's first moments by a factor."""
    for state in optimizer.state.values():
        for name in FIRST_MOMENTS:
            if isinstance(state.get(name), torch.Tensor):
                state[name].mul_(factor)
