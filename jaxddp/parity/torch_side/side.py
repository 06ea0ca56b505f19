"""The torch half of what is compared: a model, its loss, its optimizer and its batches. Knows no jax."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset
from jaxddp.errors import InputError
from jaxddp.parity.port import Facts, Port, load_port
from torch_ref import comm_hooks, models, optim
from torch_ref.amp import autocast, grad_scaler
from torch_ref.comm_hooks import Hook
from torch_ref.distributed import World
from torch_ref.gradient_hooks import GradientHook
from torch_ref.loader import Loader
from torch_ref.losses import Batch, CountFunction, LossFunction, Sums, count_labels, cross_entropy

MakeOptimizer = Callable[[Iterable[nn.Parameter], World], tuple[Optimizer, LRScheduler | None]]
# (rank, world_size) -> the micro-batches of each of that rank's steps
Batches = Callable[[int, int], Iterator[list[Batch]]]


class TorchSide(NamedTuple):
    """What a torch rank needs to make steps; the rest is `torch_ref.step.train_step`."""

    model: nn.Module
    loss_fn: LossFunction
    make_optimizer: MakeOptimizer
    batches: Batches
    facts: Facts
    find_unused_parameters: bool = False
    count_fn: CountFunction = count_labels
    buffers: str = "rank0"
    ema_decay: float | None = None
    gradient_hooks: tuple[GradientHook, ...] = ()
    own_parameters: bool = False
    comm_hook: Callable[[World], tuple[Any, Hook]] = lambda world: (world.group, allreduce_hook)
    scaler: GradScaler | None = None


class TorchSource(Protocol):
    """Something small that crosses to another process and becomes a torch side there."""

    @property
    def name(self) -> str:
        """What a reader knows it by: the file, for a port in one."""

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        """Build it, for a run of so many steps in this dtype."""


class PortSource(Protocol):
    """Something small that crosses to another process and becomes a port there."""

    @property
    def name(self) -> str:
        """What it is called where a reader meets it."""

    def port(self) -> Port:
        """The port."""


@dataclass(frozen=True)
class PortFile:
    """A user's port, in a file."""

    path: str

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    def port(self) -> Port:
        """What the file says."""
        return load_port(self.path)


@dataclass(frozen=True)
class OfPort:
    """The torch half of a port."""

    source: PortSource

    @property
    def name(self) -> str:
        """The port's."""
        return self.source.name

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        """What the port's torch functions make."""
        return side_of_port(self.source.port(), steps, dtype)


@dataclass(frozen=True)
class BuiltIn:
    """A model and an optimizer of torch_ref."""

    config: TrainConfig
    dataset: Dataset

    @property
    def name(self) -> str:
        """Model and optimizer."""
        return f"{self.config.model} {self.config.optimizer}"

    def torch_side(self, steps: int, dtype: str) -> TorchSide:
        """What `torch_ref.train` would train."""
        config = self.config

        def batches(rank: int, world_size: int) -> Iterator[list[Batch]]:
            loader = Loader(self.dataset.train, config, world_size, [rank])
            return (step for epoch in count() for step in loader.epoch(epoch))

        return TorchSide(
            models.build(config, self.dataset).to(getattr(torch, dtype)),
            autocast(cross_entropy, config.amp),
            lambda parameters, world: optim.from_config(parameters, config, steps, world),
            batches,
            Facts(
                accumulation_steps=config.accumulation_steps,
                clip_grad_norm=config.clip_grad_norm,
                loss_normalization=config.loss_normalization,
            ),
            buffers=config.buffers,
            ema_decay=config.ema_decay,
            own_parameters=config.start_local_sgd_iter is not None,
            comm_hook=partial(comm_hooks.from_config, config),
            scaler=grad_scaler(config, torch.device("cpu")),
        )


def side_of_port(port: Port, steps: int, dtype: str) -> TorchSide:
    """A port's torch half.

    Args:
        steps: optimizer steps of the whole run; schedules need their number.
        dtype: of parameters, buffers and inputs.

    Raises:
        InputError: the model has complex tensors.
    """
    model = port.torch_model()
    for name, tensor in model.state_dict().items():
        if tensor.is_complex():
            raise InputError(f"torch_model: {name} is {str(tensor.dtype)[6:]}; must be real")
    model.to(getattr(torch, dtype))

    def loss_fn(model: nn.Module, batch: Batch) -> Sums:
        loss = port.torch_loss(model, batch)
        values, weights = loss if isinstance(loss, tuple) else (loss, torch.ones_like(loss))
        return {"loss": (values * weights).sum(), "count": weights.sum().to(values.dtype)}

    def count_fn(batch: Batch) -> Tensor:
        with torch.no_grad():
            return loss_fn(copy.deepcopy(model), batch)["count"]  # a copy: buffers change as it runs

    def make_optimizer(parameters: Iterable[nn.Parameter], world: World) -> tuple[Optimizer, LRScheduler | None]:
        if port.optimizer_config is not None:
            return optim.from_config(parameters, port.optimizer_config, steps)
        assert port.torch_optimizer is not None, "Port saw to it"
        optimizer = port.torch_optimizer(list(parameters))
        return optimizer, None if port.torch_scheduler is None else port.torch_scheduler(optimizer)

    def batches(rank: int, world_size: int) -> Iterator[list[Batch]]:
        every = (port.micro_batches(step, rank, "torch") for step in count())
        return ([to_batch(micro_batch, dtype) for micro_batch in micro_batches] for micro_batches in every)

    return TorchSide(model, loss_fn, make_optimizer, batches, port.facts, port.find_unused_parameters, count_fn)


def under_all_names(model: nn.Module, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A state_dict, of tensors in which a parameter that has several names stands under its first.

    >>> twice = nn.Linear(1, 1, bias=False)
    >>> sorted(under_all_names(nn.Sequential(twice, twice), {"0.weight": np.ones((1, 1))}))
    ['0.weight', '1.weight']
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {**tensors, **{name: tensors[known] for name, known in every.items() if known in tensors}}


def to_batch(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, Tensor]:
    """Arrays as tensors: numbers in the run's dtype, labels as int64, masks as they are."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(getattr(torch, dtype))
        return tensor if tensor.dtype == torch.bool else tensor.long()

    return {name: cast(tensor) for name, tensor in tensors.items()}
