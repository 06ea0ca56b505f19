"""SimpleDDP in PyTorch: one process per replica."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, TensorDataset

from examples.from_scratch.course import Measured, Side, measure
from examples.from_scratch.loops import milliseconds
from examples.from_scratch.problem import CONFIG, TIMED, TIMED_STEPS, Batch, batches
from examples.from_scratch.skeleton import Place, Skeleton
from jaxddp.config.options import Platform
from jaxddp.data import datasets
from torch_ref import models, optim
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import bare, wrap
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.losses import cross_entropy


class SimpleDDP(Skeleton):
    """Data parallelism in one collective: the mean of the gradients.

    Args:
        module: this rank's copy of the model; must equal the other ranks' copies.
        optimizer: optimizer of the module's parameters.
        world: the ranks that train together.

    Raises:
        TrainingError: the copies differ; raised on every rank.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, world: World):
        self.module, self._optimizer, self._world = module, optimizer, world
        self.check_replicas()

    def gaps(self) -> dict[str, list[float]]:
        """See `Skeleton`."""
        return {name: self._gap(parameter.detach()).tolist() for name, parameter in self.module.named_parameters()}

    def backward(self, batch: Any, scale: float = 1.0) -> None:
        """See `Skeleton`; the batch holds tensors (B, ...)."""
        sums = cross_entropy(self.module, batch)
        (scale * sums["loss"] / sums["count"]).backward()

    def average_gradients(self) -> None:
        """See `Skeleton`."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self._world.all_reduce(parameter.grad, "mean")

    def step(self) -> None:
        """See `Skeleton`."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """See `Skeleton`."""
        return parameters(self.module)

    def wait(self) -> Self:
        """See `Skeleton`; on a CPU nothing is pending."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return self

    def _gap(self, parameter: Tensor) -> Tensor:
        first = self._world.broadcast(parameter.clone())
        return self._world.all_gather((parameter - first).abs().max())


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()}


def place(world: World) -> Place:
    """Return this rank's place; without torchrun all ranks are on this machine."""
    return Place(world.rank, int(os.environ.get("LOCAL_RANK", world.rank)), world.world_size)


def on_rank(world: World, batch: Batch) -> dict[str, Tensor]:
    """Return this rank's slice of a batch, as tensors on its device."""
    mine = {name: torch.from_numpy(array[world.rank]).to(world.device) for name, array in batch.items()}
    return {**mine, "y": mine["y"].long()}


def simple(world: World, seeds: Sequence[int], lr: float, config: TorchConfig = CONFIG) -> SimpleDDP:
    """Build a SimpleDDP that has on rank r the initial weights of seeds[r]."""
    module = models.build(replace(config, seed=seeds[world.rank]), datasets.load(config)).to(world.device)
    optimizer, _ = optim.from_config(module.parameters(), replace(config, lr=lr), 1)
    return SimpleDDP(module, optimizer, world)


def real(world: World, placed: Sequence[Any]) -> dict[str, Tensor]:
    """Return the parameters after a step of `DistributedDataParallel` on each batch."""
    ddp = wrap(models.build(CONFIG, datasets.load(CONFIG)).to(world.device), world)
    optimizer, _ = optim.from_config(ddp.parameters(), CONFIG, 1)
    for batch in placed:
        optimizer.zero_grad()
        sums = cross_entropy(ddp, batch)
        (sums["loss"] / sums["count"]).backward()
        optimizer.step()
    return parameters(bare(ddp))


def times(world: World) -> dict[str, float]:
    """Time a step in milliseconds: of one replica, of two without synchronisation, of two with it."""
    placed = [on_rank(world, batch) for batch in batches(TIMED, TIMED_STEPS)]
    apart = simple(world, (0, 0), TIMED.base_lr, TIMED)
    with apart.no_sync():
        without = milliseconds(apart, placed)
    together = milliseconds(simple(world, (0, 0), TIMED.base_lr, TIMED), placed)
    alone = 0.0
    if world.rank == 0:  # while the others wait
        alone = milliseconds(simple(World(device=world.device), (0,), TIMED.base_lr, TIMED), placed)
    world.barrier()
    return {"one": alone, "apart": without, "together": together}


def rank_main(world: World, config: TorchConfig) -> dict[str, Any]:
    """Run all steps of the course on one rank."""
    side = Side(partial(simple, world), partial(real, world), partial(on_rank, world))
    return {"place": vars(place(world)), "measured": vars(measure(side)), "times": times(world)}


def run(platform: Platform | None) -> tuple[list[Place], Measured, dict[str, float]]:
    """Run all steps of the course on two ranks; return their places, and rank 0's measurements and times."""
    ranks = launch(rank_main, replace(CONFIG, platform=platform))
    return [Place(**rank["place"]) for rank in ranks], Measured(**ranks[0]["measured"]), ranks[0]["times"]


def sampler_steps(num_examples: int, world_size: int, batch_size: int) -> list[int]:
    """Count the full batches of each rank under `DistributedSampler`."""
    examples = TensorDataset(torch.empty(num_examples))
    return [len(DistributedSampler(examples, world_size, rank)) // batch_size for rank in range(world_size)]
