"""Training state, which determines the next step and can be saved."""

from dataclasses import dataclass, field

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class TrainState:
    """Training state between two optimizer steps, which change it in place.

    The position in the data and the learning rate follow from `step`.

    Attributes:
        module: the model, not wrapped, with its parameters and buffers.
        optimizer: the optimizer, with its state.
        scheduler: learning-rate scheduler; None if the learning rate is constant.
        step: number of optimizer steps so far, including skipped ones.
        averaged: torch's AveragedModel of the module; None without an average.
        scaler: loss scaler; disabled without loss scaling.
        skipped: number of steps skipped so far, in which the scheduler has not advanced.
    """

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    step: int = 0
    averaged: AveragedModel | None = None
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    skipped: int = 0

    def advance(self, skipped: bool) -> None:
        """Count a step; unless it was skipped, update the moving average of the parameters, if there is one."""
        self.step += 1
        self.skipped += skipped
        if self.averaged is None:
            return
        if not skipped:
            self.averaged.update_parameters(self.module)
        else:  # update_parameters would also copy the buffers, which the forward pass has changed
            for kept, buffer in zip(self.averaged.module.buffers(), self.module.buffers(), strict=True):
                kept.copy_(buffer)


def averaged_model(module: nn.Module, decay: float | None) -> AveragedModel | None:
    """Return a moving average of a module's parameters; None without a decay.

    Source: pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    return None if decay is None else AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
