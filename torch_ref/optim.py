"""torch.optim's optimizers and learning-rate schedulers."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from jaxddp.config import TrainerConfig
from jaxddp.config.name_patterns import grouped_names
from jaxddp.errors import InputError
from torch_ref.distributed import World
from torch_ref.local_sgd import averaging
from torch_ref.zero import sharded

_KINDS: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, ASGD, NAdam, RAdam, Rprop)
_CLASSES = {kind.__name__.lower(): kind for kind in _KINDS}

_SCHEDULERS: dict[str, type[LRScheduler]] = {
    "step": StepLR,
    "multi_step": MultiStepLR,
    "constant_factor": ConstantLR,
    "linear": LinearLR,
    "exponential": ExponentialLR,
    "polynomial": PolynomialLR,
    "cosine": CosineAnnealingLR,
    "cosine_restarts": CosineAnnealingWarmRestarts,
    "cyclic": CyclicLR,
    "one_cycle": OneCycleLR,
    "plateau": ReduceLROnPlateau,
}


class ThenSWA:
    """Scheduler that hands over to torch's SWALR, like a loop that steps it at the end of each late epoch.

    Args:
        optimizer: the optimizer.
        main: scheduler of the first epochs; None: their rate is constant.
        start: optimizer steps after which SWALR is made.
        steps_per_epoch: optimizer steps between two of its steps.
        options: arguments of SWALR.
    """

    def __init__(
        self, optimizer: Optimizer, main: LRScheduler | None, start: int, steps_per_epoch: int, **options: Any
    ):
        self.optimizer, self._main, self._start, self._steps_per_epoch = optimizer, main, start, steps_per_epoch
        self._options = options
        self._swa: SWALR | None = None
        self._steps = 0

    def step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1
        if self._steps <= self._start and self._main is not None:
            self._main.step()
        if self._steps == self._start:
            self._swa = SWALR(self.optimizer, **self._options)
        elif self._swa is not None and self._steps % self._steps_per_epoch == 0:
            self._swa.step()


def from_config(
    parameters: Iterable[Tensor], config: TrainerConfig, total_steps: int, world: World | None = None
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
    >>> optimizer, scheduler = from_config([weight], TrainerConfig(optimizer="sgd", lr=0.1, schedule="one_cycle"), 10)
    >>> optimizer.param_groups[0]["momentum"], round(scheduler.get_last_lr()[0], 4)
    (0.95, 0.004)
    """
    optimizer = _CLASSES[config.optimizer](parameters, **config.optimizer_options())
    if config.shard_optimizer:
        optimizer = sharded(optimizer, world or World())
    scheduler = _scheduler(optimizer, config, total_steps or config.warmup_steps + 1)  # 0: a run of 0 epochs
    if config.start_local_sgd_iter is not None:
        optimizer = averaging(optimizer, config, world or World())
    return optimizer, scheduler


def param_groups(module: nn.Module, groups: Mapping[str, Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Return groups of a module's parameters for an optimizer, by the first pattern that matches the name.

    Args:
        module: parameters of a group of None stop requiring gradients, and are in no group.
        groups: pattern, as in `fnmatch` ("encoder.*"), -> options of the optimizer for these parameters.

    Raises:
        InputError: a pattern matches no parameter, or only parameters of patterns before it, or no pattern matches a
            parameter.

    >>> layer = nn.Linear(3, 2)
    >>> [(len(group["params"]), group["lr"]) for group in param_groups(layer, {"bias": {"lr": 0.2}, "*": {"lr": 0.1}})]
    [(1, 0.2), (1, 0.1)]
    """
    parameters = dict(module.named_parameters())
    made = []
    for pattern, names in grouped_names("param_groups", groups, parameters).items():
        options, members = groups[pattern], [parameters[name] for name in names]
        if options is not None:
            made.append({"params": members, **options})
        else:
            for parameter in members:
                parameter.requires_grad_(False)
    return made


def _scheduler(optimizer: Optimizer, config: TrainerConfig, total_steps: int) -> Any:
    main = _of_schedule(optimizer, config, total_steps)
    if config.swa_lr is None or config.swa_start is None:
        return main
    steps_per_epoch = max(1, total_steps // max(1, config.epochs))
    options = {"swa_lr": config.swa_lr, "anneal_epochs": config.anneal_epochs}
    return ThenSWA(optimizer, main, config.swa_start * steps_per_epoch, steps_per_epoch, **options)


def _of_schedule(optimizer: Optimizer, config: TrainerConfig, total_steps: int) -> LRScheduler | None:
    given, schedule = config.schedule_options(), config.schedule
    if schedule == "constant":
        return None
    if schedule == "warmup_cosine":
        return _warmup_cosine(optimizer, total_steps, config.warmup_steps, config.min_lr)
    if schedule == "cosine":
        given = {"T_max": total_steps} | given
    elif schedule == "cyclic":
        given["base_lr"] = config.base_lr
    elif schedule == "one_cycle":
        if config.pct_start * total_steps == 1:  # torch would divide by 0
            raise InputError(f"--pct-start {config.pct_start}: of {total_steps} steps is one; choose another share")
        given |= {"max_lr": config.base_lr, "total_steps": total_steps}
    elif schedule == "plateau":
        given["mode"] = config.best_mode
    return _SCHEDULERS[schedule](optimizer, **given)


def _warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int, min_lr: float) -> LRScheduler:
    if warmup_steps >= total_steps:
        raise InputError(f"--warmup-steps {warmup_steps}: must be below the run's {total_steps} optimizer steps")
    if warmup_steps == 0:
        return CosineAnnealingLR(optimizer, T_max=total_steps, eta_min=min_lr)
    rise = LinearLR(optimizer, start_factor=1 / 3, total_iters=warmup_steps)
    fall = CosineAnnealingLR(optimizer, T_max=total_steps - warmup_steps, eta_min=min_lr)
    return SequentialLR(optimizer, [rise, fall], milestones=[warmup_steps])


def fast_forward(scheduler: LRScheduler | ThenSWA | None, steps: int) -> None:
    """Advance a new scheduler by `steps` optimizer steps.

    torch's schedulers compute each rate from the one before, so they advance step by step: only then does a
    resumed run equal the uninterrupted one, bit for bit.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> _, scheduler = from_config([weight], TrainerConfig(lr=0.1, schedule="step", step_size=2), 10)
    >>> fast_forward(scheduler, 4)
    >>> round(scheduler.get_last_lr()[0], 4)
    0.001
    """
    if scheduler is None or steps == 0 or isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # before `optimizer.step()`
        for _ in range(steps):
            scheduler.step()
