"""Hooks in torch, which autograd calls in the backward pass; this knows no jax."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torch_ref.models
from examples.gradient_hooks.settings import CONFIG, LIMIT, POISONED, POISONED_REPLICA, batch
from jaxddp.data import datasets
from jaxddp.tracking.gradient_metrics import explained
from torch_ref.comm_hooks import register
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.gradient_hooks import GradientHook
from torch_ref.gradient_log import GradientLog
from torch_ref.losses import cross_entropy
from torch_ref.metrics import all_reduce_sums
from torch_ref.step import train_step

Local = Callable[[str, Tensor], Tensor | None]  # (name, gradient) -> the one to go on with; None: the same
SMALL_BUCKET = 0.0005  # MiB: less than the weights of any layer
SENT = "(sent)"


def build() -> nn.Module:
    """The model, with the weights that it has in JAX."""
    return torch_ref.models.build(CONFIG, datasets.load(CONFIG))


def mine(world: World) -> dict[str, Tensor]:
    """This rank's examples."""
    return {name: torch.from_numpy(values[world.rank]).to(world.device) for name, values in batch().items()}


def run(
    world: World, local: Sequence[Local] = (), mean: Sequence[GradientHook] = ()
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float], str]:
    """Make a step; return what hooks behind these have seen, the step's metrics, and what they say of NaNs."""
    module = build()
    seen: dict[str, dict[str, Tensor]] = {"local": {}, "mean": {}}
    for name, parameter in module.named_parameters():
        for hook in local:
            parameter.register_hook(partial(hook, name))
        parameter.register_hook(partial(_keep, seen["local"], name))
    log = GradientLog(module, world, CONFIG)
    ddp = DistributedDataParallel(module, process_group=world.group)
    register(ddp, CONFIG, world, [log.look])
    looking = GradientHook("*", partial(_keep, seen["mean"]), "mean")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sums = train_step(ddp, optimizer, None, [mine(world)], world, gradient_log=log, gradient_hooks=(*mean, looking))
    [metrics] = all_reduce_sums([sums], world)
    return seen, metrics, explained(metrics, [name for name, _ in module.named_parameters()])


def _keep(seen: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    seen[name] = gradient.clone()


def clip(name: str, gradient: Tensor) -> Tensor:
    """Every element at most `LIMIT`."""
    return gradient.clamp(-LIMIT, LIMIT)


def poison(name: str, gradient: Tensor, rank: int) -> Tensor:
    """One parameter's gradient is NaN on one rank."""
    return gradient * torch.nan if (rank, name) == (POISONED_REPLICA, POISONED) else gradient


def order_of_a_backward_pass(world: World) -> list[str]:
    """The parameters in the order of their gradients, and `SENT` wherever DDP sends those that it has."""
    module = build()
    happened: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: happened.append(name))
    ddp = DistributedDataParallel(module, process_group=world.group, bucket_cap_mb=SMALL_BUCKET)
    ddp.register_comm_hook((happened, world.group), _noted)
    for _ in range(2):  # the first pass tells DDP the order, by which it makes its buckets anew
        happened.clear()
        cross_entropy(ddp, mine(world))["loss"].backward()
    return happened


def _noted(state: tuple[list[str], dist.ProcessGroup], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    happened, group = state
    happened.append(SENT)
    return allreduce_hook(group, bucket)


def hooked(world: World, config: TorchConfig) -> dict[str, Any]:
    """What hooks see, change and find on this rank."""
    seen, logged, _ = run(world)
    _, _, told = run(world, local=[partial(poison, rank=world.rank)])
    return {
        "seen": seen,
        "logged": logged,
        "clipped": {
            "local": run(world, local=[clip])[0]["mean"],
            "mean": run(world, mean=[GradientHook("*", clip, "mean")])[0]["mean"],
        },
        "told": told,
        "order": order_of_a_backward_pass(world),
    }
