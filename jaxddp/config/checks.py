"""Checks of a training run's options: names, ranges and combinations. Each error says what would be right."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxddp.config.choices import BELONGS_TO, NAMED, NEEDED_BY_SCHEDULE, POWER_SGD, TRACKERS
from jaxddp.config.hints import VALUES
from jaxddp.config.options import BuiltInOptions, TrainerOptions
from jaxddp.config.period import Period
from jaxddp.config.ranges import RANGES, check_range
from jaxddp.errors import InputError, check_name

# Options of a step that all replicas take together; in post-local SGD they step separately.
COMMON_STEP = (
    *("comm_hook", "loss_normalization", "ema_decay", "swa", "swa_start", "shard_optimizer", "join", "scaler"),
    *("log_gradients", "skip_nonfinite"),
)


def is_flag(config: TrainerOptions, name: str) -> bool:
    """Return whether an option is the trainer's or the built-in program's, and not one of a user's program."""
    return hasattr(TrainerOptions, name) or (isinstance(config, BuiltInOptions) and hasattr(BuiltInOptions, name))


def check_names(config: TrainerOptions) -> None:
    """Raise `InputError` unless each named choice is known."""
    for name, known in NAMED.items():
        if is_flag(config, name) and (value := getattr(config, name)) is not None:
            check_name(flag(name), value, known, VALUES.get(name, {}))


def check_ranges(config: TrainerOptions) -> None:
    """Raise `InputError` unless each number is in its range."""
    for name in filter(partial(is_flag, config), RANGES):
        value = getattr(config, name)
        check_range(name, value, typed(name, value))
    if config.shuffle not in (True, False):
        check_name("--shuffle", str(config.shuffle), ("index",))
    Period.parse("--checkpoint-every", config.checkpoint_every)
    evaluate = Period.parse("--evaluate-every", config.evaluate_every)
    if evaluate.unit == "minutes" or not evaluate.count:
        raise InputError(f"--evaluate-every {config.evaluate_every}: must be a number of epochs or steps above 0")
    for name in config.track:
        check_name("--track", name, TRACKERS)
    if config.seed + config.epochs > 2**64:  # epoch e is shuffled by seed + e
        raise InputError(f"--seed {config.seed}: must stay below 2**64 over {config.epochs} epochs, as torch's seeds")


def check_combinations(config: TrainerOptions) -> None:
    """Raise `InputError` if an option contradicts another."""
    if config.optimizer == "sgd" and config.nesterov and (not config.momentum or config.dampening):
        raise InputError("--nesterov: needs --momentum above 0 and no --dampening")
    _check_join(config)
    if config.clip_grad_value is not None and config.clip_grad_norm is not None:
        raise InputError(
            f"{typed('clip_grad_value', config.clip_grad_value)}: cannot be combined with --clip-grad-norm"
        )
    if config.on_nan == "skip" and config.amp == "fp16":
        raise InputError("--on-nan skip: the loss scaler of --amp fp16 skips such steps already; leave it out")
    if config.on_nan == "skip" and config.start_local_sgd_iter is not None:
        raise InputError(
            "--on-nan skip: cannot be combined with --start-local-sgd-iter, where replicas step separately"
        )
    if config.output is None and config.resume is None:
        for name in config.track:
            if name != "tensorboard":
                raise InputError(f"--track {name}: needs --output")
    if config.on_nan == "rollback" and config.output is None:
        raise InputError("--on-nan rollback: goes back to a checkpoint, so it needs --output")
    if config.weights is not None and config.weights_partial is not None:
        raise InputError(f"{typed('weights_partial', config.weights_partial)}: cannot be combined with --weights")
    if config.amp != "none" and config.dtype != "float32":
        raise InputError(f"--amp {config.amp}: computes float32 in 16 bits, so it needs --dtype float32")
    cycled = config.schedule in BELONGS_TO["schedule"]["cycle_momentum"] and config.cycle_momentum
    _check_schedule(config, cycled)
    if config.etas is not None and not config.etas[0] < 1 < config.etas[1]:
        raise InputError(f"{typed('etas', config.etas)}: must be below 1 and above 1")
    if (config.use_error_feedback or config.warm_start) and config.start_power_sgd_iter < 2:
        raise InputError(
            f"--start-power-sgd-iter {config.start_power_sgd_iter}: must be at least 2 "
            "unless --no-use-error-feedback and --no-warm-start are given"
        )
    if config.amp == "fp16" and config.comm_hook in POWER_SGD and (config.use_error_feedback or config.warm_start):
        raise InputError(
            f"--amp fp16: an overflow would stay in the state of --comm-hook {config.comm_hook}; use bf16, "
            "or --no-use-error-feedback and --no-warm-start"
        )
    if config.shard_optimizer and config.optimizer == "sgd" and not (config.momentum or cycled):
        raise InputError("--shard-optimizer: sgd without --momentum has no state to shard")
    _check_local_sgd(config)


def _check_schedule(config: TrainerOptions, cycled: bool) -> None:
    """Raise `InputError` if the schedule lacks an option, or has one that it cannot use."""
    schedule = f"--schedule {config.schedule}"
    for name in NEEDED_BY_SCHEDULE.get(config.schedule, ()):
        if getattr(config, name) in (None, ()):
            raise InputError(f"{schedule}: needs {flag(name)}")
    with_momentum = {*BELONGS_TO["optimizer"]["momentum"], *BELONGS_TO["optimizer"]["betas"]}
    if cycled and config.optimizer not in with_momentum:
        raise InputError(f"{schedule}: {config.optimizer} has no momentum to cycle; add --no-cycle-momentum")
    if config.schedule == "plateau" and config.factor == 1:
        raise InputError(f"{typed('factor', config.factor)}: must be below 1 with {schedule}")
    if config.swa_start is None:
        if config.swa_lr is not None:
            raise InputError(f"{typed('swa_lr', config.swa_lr)}: needs --swa-start")
        return
    start = typed("swa_start", config.swa_start)
    if config.ema_decay is not None:
        raise InputError(f"{start}: cannot be combined with --ema-decay; a run keeps one average")
    if config.swa_lr is not None and config.schedule == "plateau":
        raise InputError(f"{typed('swa_lr', config.swa_lr)}: cannot be combined with {schedule}, which sets the rate")
    if config.swa_start >= config.epochs > 0:
        raise InputError(f"{start}: must be below --epochs {config.epochs}, or nothing is averaged")


def check_built_in(options: BuiltInOptions, dropout_masks: str) -> None:
    """Raise `InputError` if an option of the built-in program contradicts another."""
    if options.dataset == "npz" and options.data_path is None:
        raise InputError("--dataset npz: needs --data-path FILE.npz")
    if options.model == "char_mlp" and options.dataset != "names":
        raise InputError(f"--model char_mlp: reads characters, so it needs --dataset names, not {options.dataset}")
    if options.dataset == "names" and options.model != "char_mlp":
        raise InputError(f"--dataset names: holds characters, so it needs --model char_mlp, not {options.model}")
    if dropout_masks != "replica" and not options.dropout:
        raise InputError(f"--dropout-masks {dropout_masks}: needs --dropout above 0")


def _check_local_sgd(config: TrainerOptions) -> None:
    """Raise `InputError` for options that post-local SGD excludes or needs."""
    if config.start_local_sgd_iter is not None and config.amp == "fp16":
        raise InputError(
            "--amp fp16: cannot be combined with --start-local-sgd-iter, where replicas would skip different steps; "
            "use bf16"
        )
    if config.start_local_sgd_iter is None:
        if config.local_sgd_period is not None:
            raise InputError(f"{typed('local_sgd_period', config.local_sgd_period)}: needs --start-local-sgd-iter")
        return
    check_combines_with_local_sgd(config, "--start-local-sgd-iter", typed)


def check_combines_with_local_sgd(
    options: Any, local_sgd: str, written: Callable[[str, Any], str] = lambda name, value: name
) -> None:
    """Raise `InputError` unless the options that need a common step of all replicas have their defaults.

    Args:
        options: a dataclass with some of the options in `COMMON_STEP`.
        local_sgd: name of the option that turns on post-local SGD.
        written: (option, value) -> their spelling in the message.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in COMMON_STEP and value != field.default:
            raise InputError(
                f"{written(field.name, value)}: cannot be combined with {local_sgd}, where replicas step separately"
            )


def _check_join(config: TrainerOptions) -> None:
    """Raise `InputError` for options that `--join` excludes or needs."""
    dropping = [name for name in ("drop_last", "drop_last_batch") if getattr(config, name)]
    if config.join and dropping:
        raise InputError(f"--join: uses every example, and {flag(dropping[0])} drops some; remove one of the two")
    if config.join and config.buffers == "mean":
        raise InputError(
            "--buffers mean: cannot be combined with --join, where replicas run out of examples; must be rank0 or local"
        )
    if not config.divide_by_initial_world_size and not config.join:
        raise InputError("--no-divide-by-initial-world-size: only with --join")
    if not config.divide_by_initial_world_size and config.loss_normalization == "global":
        raise InputError(
            "--no-divide-by-initial-world-size: --loss-normalization global divides by the number of elements; "
            "only with ddp"
        )


def flag(field: str) -> str:
    """Return the command-line spelling of a config field.

    >>> flag("global_batch_size")
    '--global-batch-size'
    """
    return "--" + field.replace("_", "-")


def square_side(numbers: int) -> int:
    """Return the side of the smallest square with room for `numbers` elements, the layout of `batched_powerSGD`.

    >>> square_side(620)
    25
    """
    return math.isqrt(max(0, numbers - 1)) + 1


def typed(field: str, value: Any) -> str:
    """Return a flag with its value, as on the command line.

    >>> typed("hidden_sizes", (8, 0)), typed("cycle_momentum", False)
    ('--hidden-sizes 8 0', '--no-cycle-momentum')
    """
    if isinstance(value, bool):
        return flag(field if value else f"no_{field}")
    return f"{flag(field)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
