"""Everything that decides a run's next step."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class TrainState:
    """The state between two optimizer steps; the steps change it in place.

    The sampler's position and the schedule follow from `step`.

    Attributes:
        module: the model, not wrapped: its parameters and buffers.
        optimizer: its moments; its learning rate and momentum are the schedule's.
        scheduler: None where the learning rate is constant.
        averaged: torch's AveragedModel of the module; None where none is kept.
        step: optimizer steps made so far.
    """

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    step: int = 0
    averaged: AveragedModel | None = None

    def average(self) -> None:
        """Take the parameters into their moving average, if one is kept."""
        if self.averaged is not None:
            self.averaged.update_parameters(self.module)


def averaged_model(module: nn.Module, decay: float | None) -> AveragedModel | None:
    """The moving average of a module's parameters; None without a decay.

    Source: pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    return None if decay is None else AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
