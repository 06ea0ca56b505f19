"""Configuration of a training run: checked options (`jaxddp.config.options`) and the values derived from them.

`jaxddp train` and `python -m torch_ref.train` share it, so it imports neither jax nor torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from jaxddp.config.checks import (
    check_built_in,
    check_combinations,
    check_names,
    check_ranges,
    flag,
    is_flag,
    square_side,
    typed,
)
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
    SPARSER,
    TORCHS_SPELLING,
)
from jaxddp.config.options import BuiltInOptions, TrainerOptions
from jaxddp.config.period import Period
from jaxddp.config.ranges import MOST
from jaxddp.errors import InputError


@dataclass(frozen=True)
class TrainerConfig(TrainerOptions):
    """Train with one replica of the model per device, and average the gradients.

    Optimizer options default to PyTorch's. --traceback shows where in the code an error was raised.
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        *("model", "dataset", "optimizer", "lr", "weight_decay", "schedule", "epochs", "global_batch_size"),
        *("accumulation_steps", "clip_grad_norm", "amp", "devices", "seed", "weights", "output", "resume"),
    )

    def __post_init__(self) -> None:
        check_names(self)
        check_ranges(self)
        check_combinations(self)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the options of the optimizer that differ from torch's defaults, by torch's names.

        >>> TrainerConfig(optimizer="sgd", lr=0.1, nesterov=True, momentum=0.9).optimizer_options()
        {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
        """
        takers = BELONGS_TO["optimizer"]  # a program may have set options of another optimizer
        names = [name for name in OPTIMIZER_OPTIONS if self.optimizer in takers.get(name, self.optimizer)]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def schedule_options(self) -> dict[str, Any]:
        """Return the options of the schedule, by torch's names; without those of None.

        >>> TrainerConfig(schedule="cosine_restarts", t_0=10, min_lr=0.1).schedule_options()
        {'T_0': 10, 'T_mult': 1, 'eta_min': 0.1}
        """
        takers = BELONGS_TO["schedule"]
        spelling = {} if self.schedule == "plateau" else TORCHS_SPELLING
        values = {name: getattr(self, name) for name in takers if self.schedule in takers[name]}
        return {spelling.get(name, name): value for name, value in values.items() if value is not None}

    def power_sgd_options(self) -> dict[str, Any]:
        """Return the arguments of the PowerSGD hook that `comm_hook` names.

        >>> TrainerConfig(comm_hook="batched_powerSGD", warm_start=False).power_sgd_options()["warm_start"]
        False
        """
        takers = BELONGS_TO["comm_hook"]
        return {name: getattr(self, name) for name in takers if self.comm_hook in takers[name]}

    @property
    def base_lr(self) -> float:
        """Learning rate that the schedule scales (one_cycle: its peak; cyclic: the lowest)."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def averaging_period(self) -> int:
        """Optimizer steps between averagings of the parameters, in post-local SGD."""
        return DEFAULT_LOCAL_SGD_PERIOD if self.local_sgd_period is None else self.local_sgd_period

    @property
    def _belonging(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """`BELONGS_TO` for the options that this program has."""
        return {
            choice: {option: takers for option, takers in options.items() if is_flag(self, option)}
            for choice, options in BELONGS_TO.items()
            if is_flag(self, choice)
        }

    @property
    def checkpoint_period(self) -> Period:
        """Time between checkpoints."""
        return Period.parse("--checkpoint-every", self.checkpoint_every)

    @property
    def evaluation_period(self) -> Period:
        """Time between tests."""
        return Period.parse("--evaluate-every", self.evaluate_every)

    @property
    def judges(self) -> bool:
        """Return whether the run depends on `best_metric`."""
        return self.keep_best or self.early_stopping_patience is not None or self.schedule == "plateau"

    @property
    def agreement(self) -> str:
        """Note on the replicas in the last line of a run."""
        return "replicas identical" if self.start_local_sgd_iter is None else "mean of the replicas' parameters"

    def is_logged(self, step: Any) -> Any:
        """Return whether a step is logged: without `log_every` the first 400, every 2nd until 800, every 4th until ...

        Args:
            step: number of the step, from 1; an integer or an array, as is the result.

        >>> [sum(map(TrainerConfig().is_logged, range(1, steps + 1))) for steps in (100, 1000, 100_000)]
        [100, 650, 1990]
        """
        return step % (self.log_every or 1 << sum(step >= bound for bound in SPARSER)) == 0

    def with_scaled_lr(self, world_size: int) -> Self:
        """Return the configuration with its learning rates scaled for `world_size` replicas by `lr_scaling`.

        >>> TrainerConfig(lr=0.1, lr_scaling="sqrt").with_scaled_lr(4).lr
        0.2
        """
        factor = {"none": 1.0, "linear": world_size, "sqrt": math.sqrt(world_size)}[self.lr_scaling]
        others = {name: getattr(self, name) for name in ("max_lr", "swa_lr")}
        scaled = {name: value * factor for name, value in others.items() if value is not None}
        return replace(self, lr=self.base_lr * factor, lr_scaling="none", **scaled)

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

        >>> TrainerConfig(epochs=3).total_steps(45)
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

    def check_used(self, baseline: "TrainerConfig") -> None:
        """Raise `InputError` for an option that differs from `baseline` and has no effect."""
        for choice, options in self._belonging.items():
            for option, takers in options.items():
                value, chosen = getattr(self, option), getattr(self, choice)
                if value != getattr(baseline, option) and chosen not in takers:
                    some = " or ".join(filter(None, [", ".join(takers[:-1]), takers[-1]]))
                    raise InputError(f"{typed(option, value)}: only for {flag(choice)} {some}, not {chosen}")

    def check_resumes(self, saved: "TrainerConfig") -> None:
        """Raise `InputError` if this run cannot continue from a checkpoint of `saved`."""
        stateful = {self.comm_hook, saved.comm_hook} & set(POWER_SGD)
        in_state = (("comm_hook",) if stateful else ()) + (
            ("schedule", "lr") if "plateau" in (self.schedule, saved.schedule) else ()  # its rate is in the state
        )
        for name in (*KEPT_ON_RESUME, *KEPT_ON_OR_OFF_ON_RESUME, *in_state):
            new, old = getattr(self, name, None), getattr(saved, name, None)  # a user's program lacks some
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

        >>> TrainerConfig(lr=0.2, log_every=3).changes({"lr": None, "log_every": 1})
        ['--lr 0.2 instead of its default']
        """
        over_all = self.schedule in OVER_ALL_STEPS or (self.schedule == "cosine" and self.t_max is None)
        free = {*FREE_ON_RESUME, *KEPT_ON_RESUME, *(() if over_all else ("epochs",))}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in free}
        return [
            f"{typed(name, new)} instead of {_before(name, saved[name]).removeprefix(flag(name) + ' ')}"
            for name, new in values.items()
            if saved.get(name, new) != new
        ]


@dataclass(frozen=True)
class TrainConfig(TrainerConfig, BuiltInOptions):
    """Train with one replica of the model per device, and average the gradients.

    PROGRAM.py, as the first argument, is your own model and data; --help after it shows its options too. Without it, a
    classifier of handwritten digits is trained. Optimizer options default to PyTorch's. --traceback shows where in the
    code an error was raised.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_built_in(self, self.dropout_masks)


def _before(name: str, value: Any) -> str:
    return "its default" if value is None else typed(name, value)
