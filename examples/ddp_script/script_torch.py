"""Script in torch: each replica is a process with a loader and a copy of the model.

python -m examples.ddp_script.script_torch
"""

import os
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.ddp_script.problem import (
    CLASSES,
    FEATURES,
    HIDDEN,
    TEST,
    TRAIN,
    Accuracy,
    Arrays,
    Line,
    Run,
    Settings,
    arrays,
)
from jaxddp import cli
from torch_ref.config import TorchConfig
from torch_ref.data_parallel import bare, wrap
from torch_ref.distributed import World
from torch_ref.launch import launch
from torch_ref.models import MLP


def run(settings: Settings) -> Run:
    """Start the processes, wait for them, and collect their results."""
    config = TorchConfig(devices=settings.devices, platform=settings.platform)
    ranks = launch(partial(train, settings), config)  # creates the process group and destroys it
    steps = zip(*(rank["lines"] for rank in ranks), strict=True)
    return Run(
        lines=[Line(rank, epoch, tuple(rows), loss) for step in steps for rank, epoch, rows, loss in step],
        train=Accuracy(*ranks[0]["train"]),
        test=Accuracy(*ranks[0]["test"]),
        by_loader={drop_last: Accuracy(*counts) for drop_last, counts in ranks[0]["by_loader"].items()},
        weights={name: tensor.numpy() for name, tensor in ranks[0]["weights"].items()},
        processes={rank["process"] for rank in ranks},
    )


def train(settings: Settings, world: World, config: TorchConfig) -> dict[str, Any]:
    """Train on one rank."""
    torch.manual_seed(settings.seed)
    dtype = getattr(torch, settings.dtype)
    model = wrap(MLP(FEATURES, HIDDEN, CLASSES).to(world.device, dtype), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    dataset = tensors(arrays(TRAIN, settings.dtype))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world.world_size, world.rank)
    loaders = {
        drop_last: DataLoader(dataset, settings.batch_size, sampler=sampler, drop_last=drop_last)
        for drop_last in (True, False)
    }

    lines = []
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        for x, y, rows in loaders[settings.drop_last]:
            loss = nn.functional.cross_entropy(model(x.to(world.device)), y.to(world.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.append((world.rank, epoch, rows.tolist(), loss.item()))

    module = bare(model).eval()
    return {
        "lines": lines,
        "train": accuracy(module, [share(TRAIN, settings, world)], world),
        "test": accuracy(module, [share(TEST, settings, world)], world),
        "by_loader": {drop_last: accuracy(module, loader, world) for drop_last, loader in loaders.items()},
        "weights": {name: tensor.cpu() for name, tensor in module.state_dict().items()},
        "process": os.getpid(),
    }


@torch.no_grad()
def accuracy(module: nn.Module, batches: Iterable[Any], world: World) -> list[int]:
    """Count the rows of all ranks that are right, and all their rows."""
    counts = torch.zeros(2, dtype=torch.int64, device=world.device)
    for x, y, _ in batches:
        right = module(x.to(world.device)).argmax(-1) == y.to(world.device)
        counts += torch.tensor([right.sum(), len(right)], device=world.device)
    return world.all_reduce(counts).tolist()


def share(rows: list[tuple[float, float, int]], settings: Settings, world: World) -> tuple[torch.Tensor, ...]:
    """Return this rank's rows; every row belongs to one rank."""
    return tensors(arrays(rows, settings.dtype))[world.rank :: world.world_size]


def tensors(of_rows: Arrays) -> TensorDataset:
    """Convert x, y and row to a data set of tensors."""
    x, y, row = (torch.from_numpy(of_rows[name]) for name in ("x", "y", "row"))
    return TensorDataset(x, y.long(), row)


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        chosen = cli.parse_plain(Settings, sys.argv[1:], "python -m examples.ddp_script.script_torch")
        run(chosen).show(chosen)
