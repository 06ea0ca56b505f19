"""Communication hooks: how ranks average their gradients, by torch's own DDP hooks.

Source: pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import POWER_SGD
from torch_ref.distributed import World
from torch_ref.local_sgd import local_hook

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
OfBucket = Callable[[dist.GradBucket], None]


def _orthogonalize(matrix: Tensor, epsilon: float = 0) -> None:
    """Orthogonalize a single matrix in place, by torch's function for stacks of matrices."""
    powerSGD_hook._orthogonalize(matrix.unsqueeze(0), epsilon)


# torch's own hook (1.12 to 2.13) fails at its first compression: it passes a single matrix to a function that now
# expects a stack of them.
batched_powerSGD_hook: Hook = FunctionType(
    powerSGD_hook.batched_powerSGD_hook.__code__, {**vars(powerSGD_hook), "_orthogonalize": _orthogonalize}
)

HOOKS: dict[str, Hook] = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD": batched_powerSGD_hook,
}


def from_config(config: TrainerConfig, world: World, step: int = 0) -> tuple[Any, Hook]:
    """Return the state and the hook that `config` names, in the form that `register_comm_hook` takes.

    Args:
        config: names the hook and its options.
        world: the ranks that train together.
        step: optimizer steps so far.
    """
    if config.start_local_sgd_iter is not None:
        return local_hook(config, world, step)
    state: Any = world.group
    if config.comm_hook in POWER_SGD:
        options = config.power_sgd_options()
        start = options.pop("start_power_sgd_iter")
        state = powerSGD_hook.PowerSGDState(world.group, start_powerSGD_iter=start, **options)
    return state, HOOKS[config.comm_hook]


def register(
    model: DistributedDataParallel, config: TrainerConfig, world: World, first: Sequence[OfBucket] = (), step: int = 0
) -> None:
    """Register the hook that `config` names; for "allreduce", keep DDP's default, which is equal and faster.

    Args:
        model: the replica.
        config: names the hook and its options.
        world: the ranks that train together.
        first: functions called with each bucket of local gradients before it is sent; they may change it.
        step: optimizer steps so far.
    """
    if config.comm_hook != "allreduce" or config.start_local_sgd_iter is not None or first:
        model.register_comm_hook((first, *from_config(config, world, step)), _call)


def _call(hook: tuple[Sequence[OfBucket], Any, Hook], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call a hook; wrapped, since DDP recognises bf16_compress_hook by name and refuses it without NCCL."""
    first, state, function = hook
    for of_bucket in first:
        of_bucket(bucket)
    return function(state, bucket)
