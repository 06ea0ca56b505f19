"""What happens to the gradients between the ranks: torch's own DDP communication hooks.

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

from jaxddp.config import TrainConfig
from jaxddp.config.choices import POWER_SGD
from torch_ref.distributed import World
from torch_ref.local_sgd import local_hook

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
OfBucket = Callable[[dist.GradBucket], None]


def _orthogonalize(matrix: Tensor, epsilon: float = 0) -> None:
    """torch's own of a single matrix, in place."""
    powerSGD_hook._orthogonalize(matrix.unsqueeze(0), epsilon)


# As torch has it (1.12 to 2.13), it stops at its first compression: it hands a matrix to a function that has come
# to want a stack of them.
batched_powerSGD_hook: Hook = FunctionType(
    powerSGD_hook.batched_powerSGD_hook.__code__,
    {**vars(powerSGD_hook), "_orthogonalize": _orthogonalize},
)

HOOKS: dict[str, Hook] = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD": batched_powerSGD_hook,
}


def from_config(config: TrainConfig, world: World, step: int = 0) -> tuple[Any, Hook]:
    """The state, after so many steps, and the hook that `config` names, as `register_comm_hook` takes them."""
    if config.start_local_sgd_iter is not None:
        return local_hook(config, world, step)
    state: Any = world.group
    if config.comm_hook in POWER_SGD:
        options = config.power_sgd_options()
        start = options.pop("start_power_sgd_iter")
        state = powerSGD_hook.PowerSGDState(world.group, start_powerSGD_iter=start, **options)
    return state, HOOKS[config.comm_hook]


def register(
    model: DistributedDataParallel,
    config: TrainConfig,
    world: World,
    first: Sequence[OfBucket] = (),
    step: int = 0,
) -> None:
    """Give DDP the hook that `config` names; its own default stays, which is the same and faster.

    Args:
        first: called with each bucket of local gradients before it is sent; they may change it.
        step: optimizer steps made so far.
    """
    if config.comm_hook != "allreduce" or config.start_local_sgd_iter is not None or first:
        model.register_comm_hook((first, *from_config(config, world, step)), _called)


def _called(hook: tuple[Sequence[OfBucket], Any, Hook], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook with its state. DDP knows bf16_compress_hook by name and wants NCCL for it; gloo can do it too."""
    first, state, function = hook
    for look in first:
        look(bucket)
    return function(state, bucket)
