"""Everything that decides a run's next step."""

from dataclasses import dataclass, field

from torch import nn
from torch.amp import GradScaler
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
        step: optimizer steps so far, skipped ones among them.
        scaler: the loss scaler; it is not enabled where there is none.
        skipped: steps that the scaler has skipped so far; the schedule has not seen them.
    """

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    step: int = 0
    averaged: AveragedModel | None = None
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    skipped: int = 0

    def advance(self, skipped: bool) -> None:
        """Count a step; unless it was skipped, take the parameters into their moving average, if one is kept."""
        self.step += 1
        self.skipped += skipped
        if self.averaged is None:
            return
        if not skipped:
            self.averaged.update_parameters(self.module)
        else:  # which would have taken the buffers over, that the forward pass has left
            for kept, buffer in zip(self.averaged.module.buffers(), self.module.buffers(), strict=True):
                kept.copy_(buffer)


def averaged_model(module: nn.Module, decay: float | None) -> AveragedModel | None:
    """The moving average of a module's parameters; None without a decay.

    Source: pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    return None if decay is None else AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
