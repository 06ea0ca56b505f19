"""Hooks in torch, which autograd calls during the backward pass; needs no jax."""

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

Local = Callable[[str, Tensor], Tensor | None]  # (name, gradient) -> new gradient; None leaves it unchanged
SMALL_BUCKET = 0.0005  # MiB: smaller than the weights of any layer
SENT = "(sent)"


def build() -> nn.Module:
    """Build the model, with the same weights as in JAX."""
    return torch_ref.models.build(CONFIG, datasets.load(CONFIG))


def mine(world: World) -> dict[str, Tensor]:
    """Return this rank's examples."""
    return {name: torch.from_numpy(values[world.rank]).to(world.device) for name, values in batch().items()}


def run(
    world: World, local: Sequence[Local] = (), mean: Sequence[GradientHook] = ()
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float], str]:
    """Take a step; return the gradients that further hooks see after these, the metrics, and their report of NaNs."""
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
    """Limit every element to +-`LIMIT`."""
    return gradient.clamp(-LIMIT, LIMIT)


def poison(name: str, gradient: Tensor, rank: int) -> Tensor:
    """Set one parameter's gradient to NaN on one rank."""
    return gradient * torch.nan if (rank, name) == (POISONED_REPLICA, POISONED) else gradient


def order_of_a_backward_pass(world: World) -> list[str]:
    """Return the parameters in the order of their gradients, with `SENT` wherever DDP sends a bucket."""
    module = build()
    events: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: events.append(name))
    ddp = DistributedDataParallel(module, process_group=world.group, bucket_cap_mb=SMALL_BUCKET)
    ddp.register_comm_hook((events, world.group), _record_and_send)
    for _ in range(2):  # DDP rebuilds its buckets in the order of the first backward pass
        events.clear()
        cross_entropy(ddp, mine(world))["loss"].backward()
    return events


def _record_and_send(
    state: tuple[list[str], dist.ProcessGroup], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    events, group = state
    events.append(SENT)
    return allreduce_hook(group, bucket)


def hooked(world: World, config: TorchConfig) -> dict[str, Any]:
    """Run steps on this rank with hooks that see, clip and poison gradients."""
    seen, logged, _ = run(world)
    _, _, nan_report = run(world, local=[partial(poison, rank=world.rank)])
    return {
        "seen": seen,
        "logged": logged,
        "clipped": {
            "local": run(world, local=[clip])[0]["mean"],
            "mean": run(world, mean=[GradientHook("*", clip, "mean")])[0]["mean"],
        },
        "nan_report": nan_report,
        "order": order_of_a_backward_pass(world),
    }
