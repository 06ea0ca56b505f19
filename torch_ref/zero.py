"""An optimizer whose state the ranks share among them, by torch's own ZeroRedundancyOptimizer.

Source: pytorch.org/docs/stable/distributed.optim.html; Rajbhandari et al., https://arxiv.org/abs/1910.02054
"""

import inspect

from torch.optim import Optimizer

from torch_ref.distributed import World, distributed_optim


def sharded(optimizer: Optimizer, world: World) -> Optimizer:
    """The same optimizer, of which each rank keeps the state of its share of the parameters, whole tensors.

    Args:
        optimizer: new, with one group of parameters.
        world: not without a process group.
    """
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}  # schedulers look for them
    parameters = optimizer.param_groups[0]["params"]
    make = distributed_optim().ZeroRedundancyOptimizer
    return make(parameters, type(optimizer), process_group=world.group, **options)


def consolidate(optimizer: Optimizer) -> None:
    """Bring the whole state of a sharded optimizer to rank 0, whose `state_dict` then has it; every rank calls it."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict()
