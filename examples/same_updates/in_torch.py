"""Three ways to train in PyTorch: one process; one process that splits its batch; and DDP, a process per device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.same_updates.settings import DDP, Case, Epoch, Record, Settings
from torch_ref.config import TorchConfig
from torch_ref.distributed import World
from torch_ref.launch import launch

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": AdamW, "adagrad": Adagrad, "rmsprop": RMSprop}

Run = dict[str, Any]  # a `Record` as plain values that a process can send to another


def train_all(cases: Mapping[str, Case], devices: int) -> dict[str, Record]:
    """Run all cases, by name, in one launch of `devices` CPU processes."""
    runs = launch(partial(train_as_rank, cases=cases), TorchConfig(devices=devices, platform="cpu"))[0]
    return {name: _record(run) for name, run in runs.items()}


def train_as_rank(world: World, config: TorchConfig, cases: Mapping[str, Case]) -> dict[str, Run]:
    """Run all cases on one rank: those of DDP together with the other ranks, the rest alone."""
    runs = {}
    for name, case in cases.items():
        torch.manual_seed(case.settings.seed)
        runs[name] = train(case, world if case.way == DDP else World())
    return runs


def train(case: Case, world: World) -> Run:
    """Train, drawing from torch's global random numbers."""
    settings, dtype = case.settings, getattr(torch, case.dtype)
    linear = nn.Linear(settings.dim, settings.num_labels, bias=False).to(dtype)
    model = DistributedDataParallel(linear) if case.way == DDP else linear
    loader = _loader(settings, world, dtype)
    optimizer = OPTIMIZERS[settings.opt](model.parameters(), **settings.optimizer_options)
    # nn.DataParallel needs GPUs; this computes the same: the scores of each device's part, and one loss of all scores.
    parts = 1 if case.way == DDP else case.devices

    first, weights, epochs = {}, [linear.weight.detach().clone()], []
    for _ in range(settings.epochs):
        steps, examples, sums = 0, 0, torch.zeros(4, dtype=torch.float64)
        for x, y in loader:
            scores = torch.cat([model(part) for part in x.chunk(parts)])
            loss = F.cross_entropy(scores, y, reduction=case.reduction)
            right = scores.argmax(dim=1) == y
            once = (examples + torch.arange(len(y))) * world.world_size + world.rank < settings.num_examples
            reduced = world.all_reduce(torch.stack([loss.detach(), right.sum(), (right & once).sum(), once.sum()]))
            loss.backward()
            if len(weights) == 1:
                assert linear.weight.grad is not None
                gradient = linear.weight.grad[0, 0].item()
                first = {"first_loss": loss.item(), "reduced_loss": reduced[0].item(), "gradient": gradient}
            optimizer.step()
            optimizer.zero_grad()
            weights.append(linear.weight.detach().clone())
            steps, examples, sums = steps + 1, examples + len(y), sums + reduced
        total_loss, total_right, right_once, seen_once = sums.tolist()
        accuracies = 100 * total_right / settings.num_examples, 100 * right_once / seen_once
        epochs.append((steps, total_loss / steps, *accuracies))
    return {**first, "weights": torch.stack(weights), "epochs": epochs}


def _loader(settings: Settings, world: World, dtype: torch.dtype) -> DataLoader:
    data = TensorDataset(
        torch.randn(settings.num_examples, settings.dim, dtype=dtype),
        torch.randint(settings.num_labels, (settings.num_examples,)),
    )
    shuffle = not settings.no_shuffle
    if world.world_size == 1:
        return DataLoader(data, settings.batch_size, shuffle=shuffle)
    sampler: DistributedSampler = DistributedSampler(
        data, world.world_size, world.rank, shuffle=shuffle, seed=settings.seed, drop_last=settings.drop_last
    )
    return DataLoader(data, settings.batch_size, sampler=sampler)


def _record(run: Run) -> Record:
    return Record(**run | {"weights": run["weights"].numpy(), "epochs": [Epoch(*epoch) for epoch in run["epochs"]]})
