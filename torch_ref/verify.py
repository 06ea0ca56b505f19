"""Verification that replicas are identical: every rank compares its parameters with rank 0's."""

import torch
from torch import Tensor, nn

from jaxddp.errors import TrainingError
from torch_ref.distributed import World


def verify_replicas(module: nn.Module, world: World, step: int) -> None:
    """Check that all ranks hold equal parameters, to the last digit.

    Buffers are not compared: forward passes change them differently on each rank, and DDP sends rank 0's to the
    others before the next forward pass.

    Args:
        module: the model, not wrapped.
        world: the ranks to compare.
        step: optimizer step, for the message.

    Raises:
        TrainingError: replicas differ; raised on every rank. The message names the parameter that differs most, the
            rank, the step and the largest difference.

    >>> verify_replicas(nn.Linear(2, 1), World(), step=0)
    """
    names, parameters = zip(*module.named_parameters(), strict=True)
    mine = torch.cat([parameter.detach().flatten() for parameter in parameters])
    reference = world.broadcast(mine.clone())
    gaps = [gap.max() for gap in _gap(mine, reference).split([parameter.numel() for parameter in parameters])]
    gaps_of_ranks = world.all_gather(torch.stack(gaps))  # (world_size, parameters)
    if not gaps_of_ranks.any():
        return
    rank, worst = divmod(int(gaps_of_ranks.argmax()), len(names))
    raise TrainingError(
        f"replicas differ at step {step}: {names[worst]} on rank {rank} is up to {gaps_of_ranks.max():.3g} away from "
        f"rank 0 ({gaps_of_ranks.any(dim=0).sum()} of {len(names)} parameters differ)"
    )


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|: 0 where both are NaN or the same infinity, infinite where only one of them is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0, (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
