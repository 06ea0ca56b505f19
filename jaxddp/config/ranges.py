"""Ranges of the numeric options, for the flags of the command line and the arguments of the library alike."""

import math
import sys
from collections.abc import Callable
from typing import Any

from jaxddp.errors import InputError, shortened

MOST = 2**31 - 1  # steps are counted in int32
LONGEST = 10**6  # seconds; systems wait on sockets for 2**31 milliseconds at most
LARGEST = sys.float_info.max  # also bounds integers, whose size JSON does not limit
# Words of the error message -> test of the range; NaN fails every test.
IN_RANGE: dict[str, Callable[[Any], bool]] = {
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    f"at most {MOST}": lambda x: x <= MOST,
    f"at most {LONGEST} (seconds)": lambda x: x <= LONGEST,
    "finite": lambda x: -LARGEST <= x <= LARGEST,
    "above 0": lambda x: 0 < x <= LARGEST or x == math.inf,
    "above 0 and finite": lambda x: 0 < x <= LARGEST,
    "above 1 and finite": lambda x: 1 < x <= LARGEST,
    "between 0 and 1": lambda x: 0 < x < 1,
    "0 to 1": lambda x: 0 <= x <= 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
}
COUNT_FROM_1, COUNT_FROM_0 = (("at least 1", f"at most {MOST}"), ("at least 0", f"at most {MOST}"))
NON_NEGATIVE = ("at least 0", "finite")
# Option -> its ranges, checked in this order.
RANGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("num_examples", "num_features", "num_classes", "context_length", "embedding_size"), COUNT_FROM_1),
    **dict.fromkeys(("hidden_sizes", "global_batch_size", "accumulation_steps", "devices"), COUNT_FROM_1),
    **dict.fromkeys(("steps_per_dispatch", "step_size", "matrix_approximation_rank"), COUNT_FROM_1),
    **dict.fromkeys(("start_power_sgd_iter", "growth_interval", "local_sgd_period"), COUNT_FROM_1),
    **dict.fromkeys(("keep_checkpoints", "log_every", "early_stopping_patience", "steps_per_epoch"), COUNT_FROM_1),
    "callback_every": COUNT_FROM_1,
    **dict.fromkeys(("epochs", "warmup_steps", "verify_every", "data_workers"), COUNT_FROM_0),
    **dict.fromkeys(("lr", "momentum", "weight_decay", "eps", "alpha", "lr_decay"), NON_NEGATIVE),
    **dict.fromkeys(("momentum_decay", "lambd", "t0", "step_sizes"), NON_NEGATIVE),
    **dict.fromkeys(("initial_accumulator_value", "min_lr", "gamma", "min_compression_rate"), NON_NEGATIVE),
    **dict.fromkeys(("milestones", "total_iters", "t_max", "t_0", "t_mult", "step_size_up"), COUNT_FROM_1),
    **dict.fromkeys(("step_size_down", "swa_start"), COUNT_FROM_1),
    **dict.fromkeys(("patience", "cooldown", "anneal_epochs", "start_local_sgd_iter"), COUNT_FROM_0),
    **dict.fromkeys(("power", "max_lr", "swa_lr", "threshold"), NON_NEGATIVE),
    **dict.fromkeys(("factor", "end_factor", "pct_start"), ("0 to 1",)),
    **dict.fromkeys(("div_factor", "final_div_factor"), ("above 0 and finite",)),
    "start_factor": ("above 0 and at most 1",),
    "seed": ("at least 0",),
    "dampening": ("finite",),
    "betas": ("at least 0 and below 1",),
    "rho": ("0 to 1",),
    "etas": ("above 0 and finite",),
    **dict.fromkeys(("dropout", "label_smoothing"), ("at least 0 and below 1",)),
    **dict.fromkeys(("clip_grad_norm", "clip_grad_value"), ("above 0",)),
    "ema_decay": ("0 to 1",),
    "join_timeout": ("above 0 and finite", f"at most {LONGEST} (seconds)"),
    "stall_timeout": (*NON_NEGATIVE, f"at most {LONGEST} (seconds)"),
    "init_scale": ("above 0 and finite",),
    "growth_factor": ("above 1 and finite",),
    "backoff_factor": ("between 0 and 1",),
}


def check_range(option: str, value: Any, written: str | None = None) -> None:
    """Raise `InputError` unless `value` is in the range of an option; None is in every range.

    Args:
        option: a name in `RANGES`.
        value: a number, or a tuple of numbers that must each be in the range.
        written: spelling of option and value in the message; None: "option value", as for a keyword argument.

    >>> check_range("ema_decay", 1.5)
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: ema_decay 1.5: must be 0 to 1
    """
    several = isinstance(value, tuple)
    for words in RANGES[option] if value is not None else ():
        if not all(map(IN_RANGE[words], value if several else (value,))):
            raise InputError(
                f"{shortened(written or f'{option} {value}')}: {'each ' if several else ''}must be {words}"
            )
