"""Verification that replicas are identical: every rank compares its parameters with those of the majority."""

import hashlib

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
    sizes = [parameter.numel() for parameter in parameters]
    mine = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gaps_of_ranks = world.all_gather(_gaps(mine, world.broadcast(mine.clone()), sizes))  # (world_size, parameters)
    if not gaps_of_ranks.any():
        return
    # Rank 0 may be the one that is wrong.
    reference, decided = _majority(world.all_gather(_hashes(mine, sizes)))
    gaps_of_ranks = world.all_gather(_gaps(mine, world.broadcast(mine.clone(), src=reference), sizes))
    rank, worst = divmod(int(gaps_of_ranks.argmax()), len(names))
    odd = torch.nonzero(gaps_of_ranks.any(dim=1)).flatten().tolist()
    raise TrainingError(
        f"replicas differ at step {step}: {names[worst]} on rank {rank} is up to {gaps_of_ranks.max():.3g} away from "
        f"{_against(reference, decided, odd)} ({gaps_of_ranks.any(dim=0).sum()} of {len(names)} parameters differ)"
    )


def _gaps(mine: Tensor, reference: Tensor, sizes: list[int]) -> Tensor:
    """Return the largest |mine - reference| of each parameter."""
    return torch.stack([gap.max() for gap in _gap(mine, reference).split(sizes)])


def _hashes(mine: Tensor, sizes: list[int]) -> Tensor:
    """Return 8 bytes of a hash of each parameter; 0 and -0 are the same."""
    digests = [hashlib.sha256((part + 0).cpu().numpy().tobytes()).digest() for part in mine.split(sizes)]
    return torch.tensor([int.from_bytes(digest[:8], "little", signed=True) for digest in digests], device=mine.device)


def _majority(hashes: Tensor) -> tuple[int, bool]:
    """Return the first rank of the largest group that agrees in all parameters, and whether it is a majority."""
    votes = (hashes[:, None] == hashes).all(dim=2).sum(dim=1)
    return int(votes.argmax()), bool(votes.max() * 2 > len(hashes))


def _against(reference: int, decided: bool, odd: list[int]) -> str:
    """Name the rank with which another was compared, and which of them is wrong."""
    if not decided:
        return f"rank {reference}; no majority tells which is right"
    return f"the majority; rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} must be wrong"


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|: 0 where both are NaN or the same infinity, infinite where only one of them is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0, (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
