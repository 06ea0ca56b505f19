"""Configuration of a training run: checked options (`jaxddp.config.options`) and the values derived from them.

`python -m jaxddp.train` and `python -m torch_ref.train` share it, so it imports neither jax nor torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from jaxddp.config.checks import check_combinations, check_names, check_ranges, flag, square_side, typed
from jaxddp.config.choices import (
    BELONGS_TO,
    DEFAULT_LOCAL_SGD_PERIOD,
    DEFAULT_LR,
    FREE_ON_RESUME,
    KEPT_ON_OR_OFF_ON_RESUME,
    KEPT_ON_RESUME,
    OPTIMIZER_OPTIONS,
    OVER_ALL_STEPS,
    POWER_SGD,
)
from jaxddp.config.options import TrainOptions
from jaxddp.config.period import Period
from jaxddp.config.ranges import MOST
from jaxddp.errors import InputError


@dataclass(frozen=True)
class TrainConfig(TrainOptions):
    """Data-parallel training: one replica of the model per device, gradients averaged.

    Optimizer options default to PyTorch's. jaxddp.train and torch_ref.train take the same flags.
    --traceback shows where in the code an error was raised.
    """

    def __post_init__(self) -> None:
        check_names(self)
        check_ranges(self)
        check_combinations(self)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the optimizer options that differ from torch's defaults, by torch's names.

        >>> TrainConfig(optimizer="sgd", lr=0.1, nesterov=True, momentum=0.9).optimizer_options()
        {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
        """
        values = {name: getattr(self, name) for name in OPTIMIZER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def power_sgd_options(self) -> dict[str, Any]:
        """Return the arguments of the PowerSGD hook that `comm_hook` names.

        >>> TrainConfig(comm_hook="batched_powerSGD", warm_start=False).power_sgd_options()["warm_start"]
        False
        """
        takers = BELONGS_TO["comm_hook"]
        return {name: getattr(self, name) for name in takers if self.comm_hook in takers[name]}

    @property
    def base_lr(self) -> float:
        """Learning rate that the schedule scales (one_cycle: its peak)."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def averaging_period(self) -> int:
        """Optimizer steps between averagings of the parameters, in post-local SGD."""
        return DEFAULT_LOCAL_SGD_PERIOD if self.local_sgd_period is None else self.local_sgd_period

    @property
    def checkpoint_period(self) -> Period:
        """Time between checkpoints."""
        return Period.parse("--checkpoint-every", self.checkpoint_every)

    @property
    def agreement(self) -> str:
        """Note on the replicas in the last line of a run."""
        return "replicas identical" if self.start_local_sgd_iter is None else "mean of the replicas' parameters"

    def with_scaled_lr(self, world_size: int) -> Self:
        """Return the configuration with its learning rate scaled for `world_size` replicas by `lr_scaling`.

        >>> TrainConfig(lr=0.1, lr_scaling="sqrt").with_scaled_lr(4).lr
        0.2
        """
        factor = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}[self.lr_scaling]
        return replace(self, lr=self.base_lr * factor, lr_scaling="none")

    def per_replica_batch_size(self, world_size: int) -> int:
        """Return the examples per replica and optimizer step; raise `InputError` if the batch cannot be divided."""
        parts = world_size * self.accumulation_steps
        if self.global_batch_size % parts:
            lower = self.global_batch_size // parts * parts
            near = f"{lower} or {lower + parts}" if lower else f"{parts}"
            raise InputError(
                f"--global-batch-size {self.global_batch_size}: must be divisible by {world_size} replicas x "
                f"{self.accumulation_steps} accumulation steps; {near} would do"
            )
        return self.global_batch_size // world_size

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the run; raise `InputError` if their count would not fit into int32.

        >>> TrainConfig(epochs=3).total_steps(45)
        135
        """
        most = MOST // steps_per_epoch
        if self.epochs > most:
            raise InputError(
                f"--epochs {self.epochs}: must be at most {most} with {steps_per_epoch} steps per epoch, which are "
                "counted in int32"
            )
        return self.epochs * steps_per_epoch

    def check_square(self, numbers: int) -> None:
        """Raise `InputError` if the square of `batched_powerSGD` for `numbers` gradient elements is below the rank."""
        side = square_side(numbers)
        if self.comm_hook == "batched_powerSGD" and self.matrix_approximation_rank > side:
            rank = typed("matrix_approximation_rank", self.matrix_approximation_rank)
            raise InputError(f"{rank}: must be at most {side}, the side of a square of {numbers} gradient elements")

    def check_used(self, baseline: "TrainConfig") -> None:
        """Raise `InputError` for an option that differs from `baseline` and has no effect."""
        for choice, options in BELONGS_TO.items():
            for option, takers in options.items():
                value, chosen = getattr(self, option), getattr(self, choice)
                if value != getattr(baseline, option) and chosen not in takers:
                    some = " or ".join(filter(None, [", ".join(takers[:-1]), takers[-1]]))
                    raise InputError(f"{typed(option, value)}: only for {flag(choice)} {some}, not {chosen}")

    def check_resumes(self, saved: "TrainConfig") -> None:
        """Raise `InputError` if this run cannot continue from a checkpoint of `saved`."""
        stateful = {self.comm_hook, saved.comm_hook} & set(POWER_SGD)
        for name in (*KEPT_ON_RESUME, *KEPT_ON_OR_OFF_ON_RESUME, *(("comm_hook",) if stateful else ())):
            new, old = getattr(self, name), getattr(saved, name)
            if new != old and not (name in KEPT_ON_OR_OFF_ON_RESUME and bool(new) == bool(old)):
                before = _before(name, old)
                raise InputError(f"{typed(name, new)}: the run in {self.resume} must continue with {before}")
        per_replica = ["parameters"] * (self.start_local_sgd_iter is not None) + ["buffers"] * (self.buffers == "local")
        per_replica += ["--comm-hook states"] * bool(stateful)
        if per_replica and self.devices != saved.devices:
            raise InputError(
                f"{typed('devices', self.devices)}: the run in {self.resume} has separate {per_replica[0]} for "
                f"{saved.devices} replicas; must be {saved.devices}"
            )

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Describe the options that change the numbers of a resumed run.

        Args:
            saved: options of the run before, by name; one that is missing counts as unchanged.

        >>> TrainConfig(lr=0.2, log_every=3).changes({"lr": None, "log_every": 1})
        ['--lr 0.2 instead of its default']
        """
        free = {*FREE_ON_RESUME, *KEPT_ON_RESUME, *(() if self.schedule in OVER_ALL_STEPS else ("epochs",))}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in free}
        return [
            f"{typed(name, new)} instead of {_before(name, saved[name]).removeprefix(flag(name) + ' ')}"
            for name, new in values.items()
            if saved.get(name, new) != new
        ]


def _before(name: str, value: Any) -> str:
    return "its default" if value is None else typed(name, value)
