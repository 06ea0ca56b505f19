"""Everything that decides a run's next step."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass
class TrainState:
    """The state between two optimizer steps; the steps change it in place.

    The sampler's position and the schedule follow from `step`.

    Attributes:
        module: the model, not wrapped: its parameters and buffers.
        optimizer: its moments; its learning rate and momentum are the schedule's.
        scheduler: None where the learning rate is constant.
        step: optimizer steps made so far.
    """

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    step: int = 0
