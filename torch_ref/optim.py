"""torch.optim's optimizers and learning-rate schedulers."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from torch_ref.distributed import World
from torch_ref.local_sgd import averaging
from torch_ref.zero import sharded

_CLASSES: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}


def from_config(
    parameters: Iterable[Tensor], config: TrainConfig, total_steps: int, world: World | None = None
) -> tuple[Optimizer, LRScheduler | None]:
    """Return the optimizer that `config` names, and its scheduler over a run of `total_steps` steps.

    Step the scheduler once after each optimizer step; it is None if the learning rate is constant.

    Args:
        parameters: parameters to train.
        config: names optimizer and schedule, and their options.
        total_steps: optimizer steps of the run.
        world: ranks that share a sharded optimizer's state or average their parameters; None: one rank.

    Raises:
        InputError: the run is too short for the schedule.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> optimizer, scheduler = from_config([weight], TrainConfig(optimizer="sgd", lr=0.1, schedule="one_cycle"), 10)
    >>> optimizer.param_groups[0]["momentum"], round(scheduler.get_last_lr()[0], 4)
    (0.95, 0.004)
    """
    optimizer = _CLASSES[config.optimizer](parameters, **config.optimizer_options())
    if config.shard_optimizer:
        optimizer = sharded(optimizer, world or World())
    scheduler = _scheduler(optimizer, config, max(total_steps, 1))
    if config.start_local_sgd_iter is not None:
        optimizer = averaging(optimizer, config, world or World())
    return optimizer, scheduler


def _scheduler(optimizer: Optimizer, config: TrainConfig, total_steps: int) -> LRScheduler | None:
    if config.schedule == "step":
        return StepLR(optimizer, config.step_size, config.gamma)
    if config.schedule == "warmup_cosine":
        return _warmup_cosine(optimizer, total_steps, config.warmup_steps, config.min_lr)
    if config.schedule == "one_cycle":
        return OneCycleLR(optimizer, config.base_lr, total_steps, cycle_momentum=config.cycle_momentum)
    return None


def _warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int, min_lr: float) -> LRScheduler:
    if warmup_steps >= total_steps:
        raise InputError(f"--warmup-steps {warmup_steps}: must be below the run's {total_steps} optimizer steps")
    if warmup_steps == 0:
        return CosineAnnealingLR(optimizer, T_max=total_steps, eta_min=min_lr)
    rise = LinearLR(optimizer, start_factor=1 / 3, total_iters=warmup_steps)
    fall = CosineAnnealingLR(optimizer, T_max=total_steps - warmup_steps, eta_min=min_lr)
    return SequentialLR(optimizer, [rise, fall], milestones=[warmup_steps])


def fast_forward(scheduler: LRScheduler | None, steps: int) -> None:
    """Advance a new scheduler by `steps` optimizer steps.

    torch's schedulers compute each rate from the one before, so they advance step by step: only then does a
    resumed run equal the uninterrupted one, bit for bit. The optimizer must have no gradients yet.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> _, scheduler = from_config([weight], TrainConfig(lr=0.1, schedule="step", step_size=2), 10)
    >>> fast_forward(scheduler, 4)
    >>> round(scheduler.get_last_lr()[0], 4)
    0.001
    """
    if scheduler is None or steps == 0:
        return
    scheduler.optimizer.step()  # no effect without gradients; torch warns if the scheduler steps first
    for _ in range(steps):
        scheduler.step()
