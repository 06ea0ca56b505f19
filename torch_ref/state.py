"""Training state, which determines the next step and can be saved."""

from dataclasses import dataclass, field

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
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

    @property
    def plateau(self) -> ReduceLROnPlateau | None:
        """The scheduler, if it waits for a metric instead of stepping with the optimizer."""
        return self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None

    def advance(self, skipped: bool) -> None:
        """Count a step; unless it was skipped, update the moving average of the parameters, if there is one.

        An equal average is updated by its own `update_parameters`, as at the end of a late epoch.
        """
        self.step += 1
        self.skipped += skipped
        if self.averaged is None or self.averaged.multi_avg_fn is None:  # an equal average takes no step's
            return
        if not skipped:
            self.averaged.update_parameters(self.module)
        else:  # update_parameters would also copy the buffers, which the forward pass has changed
            for kept, buffer in zip(self.averaged.module.buffers(), self.module.buffers(), strict=True):
                kept.copy_(buffer)


def averaged_model(module: nn.Module, decay: float | None, swa: bool = False) -> AveragedModel | None:
    """Return an average of a module's parameters; None without a decay or `swa`.

    Args:
        decay: that of a moving average.
        swa: average equally, as in stochastic weight averaging.

    Source: pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    if swa:
        return AveragedModel(module)
    return None if decay is None else AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
