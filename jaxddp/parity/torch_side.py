"""The torch half of what is compared: a model, its loss and its optimizer. Knows no jax."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jaxddp.config import TrainConfig
from jaxddp.datasets import Dataset
from jaxddp.parity.port import Port, load_port
from torch_ref import models, optim
from torch_ref.losses import Batch, LossFunction, Sums, cross_entropy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], tuple[Optimizer, LRScheduler | None]]


class TorchSide(NamedTuple):
    """What a torch rank needs to make steps; the rest is `torch_ref.step.train_step`."""

    model: nn.Module
    loss_fn: LossFunction
    make_optimizer: MakeOptimizer
    loss_normalization: str = "ddp"
    clip_grad_norm: float | None = None


class TorchSource(Protocol):
    """Something small that crosses to another process and becomes a torch side there."""

    def torch_side(self, steps: int) -> TorchSide:
        """Build it, for a run of so many steps."""


@dataclass(frozen=True)
class BuiltIn:
    """A model and an optimizer of torch_ref."""

    config: TrainConfig
    dataset: Dataset

    def torch_side(self, steps: int) -> TorchSide:
        """What `torch_ref.train` would train."""
        config = self.config
        return TorchSide(
            models.build(config, self.dataset),
            cross_entropy,
            lambda parameters: optim.from_config(parameters, config, steps),
            config.loss_normalization,
            config.clip_grad_norm,
        )


@dataclass(frozen=True)
class PortFile:
    """A user's port."""

    path: str

    def torch_side(self, steps: int) -> TorchSide:
        """What the port's torch functions make."""
        return side_of_port(load_port(self.path), steps)


def side_of_port(port: Port, steps: int) -> TorchSide:
    """A port's torch half.

    Args:
        steps: optimizer steps of the whole run; schedules need their number.
    """

    def loss_fn(model: nn.Module, batch: Batch) -> Sums:
        loss = port.torch_loss(model, batch)
        return {"loss": loss.sum(), "count": torch.tensor(loss.numel(), dtype=loss.dtype, device=loss.device)}

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> tuple[Optimizer, LRScheduler | None]:
        if port.optimizer_config is not None:
            return optim.from_config(parameters, port.optimizer_config, steps)
        assert port.torch_optimizer is not None, "Port saw to it"
        optimizer = port.torch_optimizer(parameters)
        return optimizer, None if port.torch_scheduler is None else port.torch_scheduler(optimizer)

    return TorchSide(port.torch_model(), loss_fn, make_optimizer, clip_grad_norm=port.clip_grad_norm)
