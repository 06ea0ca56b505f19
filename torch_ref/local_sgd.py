"""Post-local SGD by torch's own parts: a hook that stops averaging gradients, an optimizer that averages parameters.

Source: pytorch.org/docs/stable/ddp_comm_hooks.html; Lin et al., https://arxiv.org/abs/1808.07217
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim import Optimizer

from jaxddp.config import TrainerConfig
from torch_ref.distributed import World, distributed_optim


def averaging(optimizer: Optimizer, config: TrainerConfig, world: World) -> Optimizer:
    """Wrap an optimizer so that it averages the parameters over the ranks, as often as `config` sets."""
    averager = PeriodicModelAverager(config.averaging_period, config.start_local_sgd_iter, world.group)
    return distributed_optim().PostLocalSGDOptimizer(optimizer, averager)


def local_hook(config: TrainerConfig, world: World, step: int = 0) -> tuple[PostLocalSGDState, Any]:
    """Return the hook and its state after `step` optimizer steps, without an all-reduce in subgroups."""
    state = PostLocalSGDState(world.group, None, config.start_local_sgd_iter, post_local_gradient_allreduce=False)
    state.iter = step
    return state, post_localSGD_hook


@contextlib.contextmanager
def shown(module: nn.Module, config: TrainerConfig, world: World) -> Iterator[None]:
    """Replace parameters that differ between ranks by their mean in this context, to evaluate or save the module."""
    if config.start_local_sgd_iter is None:
        yield
        return
    saved = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            world.all_reduce(parameter, "mean")
        yield
        for parameter, before in zip(module.parameters(), saved, strict=True):
            parameter.copy_(before)
