"""ZeRO, stage 1: an optimizer whose state is distributed over the ranks, by torch's own ZeroRedundancyOptimizer.

Source: pytorch.org/docs/stable/distributed.optim.html; Rajbhandari et al., https://arxiv.org/abs/1910.02054
"""

import inspect

from torch.optim import Optimizer

from torch_ref.distributed import World, distributed_optim


def sharded(optimizer: Optimizer, world: World) -> Optimizer:
    """Return the same optimizer with its state distributed over the ranks, tensor by tensor.

    Args:
        optimizer: new optimizer with one parameter group.
        world: the ranks; a process group must exist.
    """
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}  # schedulers read them
    parameters = optimizer.param_groups[0]["params"]
    make = distributed_optim().ZeroRedundancyOptimizer
    return make(parameters, type(optimizer), process_group=world.group, **options)


def consolidate(optimizer: Optimizer) -> None:
    """Gather the state of a sharded optimizer on rank 0, for its `state_dict`; all ranks must call it."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict()
