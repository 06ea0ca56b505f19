"""Values of the named options of a training run, and the choices that each option belongs to."""

from typing import Any, get_args, get_type_hints

from jaxddp.config.kinds import choices_of, without_choices
from jaxddp.config.optimization import BasicOptimizer
from jaxddp.config.options import BuiltInOptions, TrainerOptions

# Option -> its choices, checked in this order.
KINDS = get_type_hints(BuiltInOptions) | get_type_hints(TrainerOptions)
NAMED: dict[str, tuple[str, ...]] = {
    name: choices_of(KINDS[name])
    for name in (
        *("model", "dataset", "optimizer", "schedule", "loss_normalization", "lr_scaling", "buffers", "dropout_masks"),
        *("comm_hook", "dtype", "amp", "cyclic_mode", "threshold_mode", "best_mode", "on_nan", "on_drift", "platform"),
    )
}
MODELS, DATASETS, OPTIMIZERS, SCHEDULES = (NAMED[name] for name in ("model", "dataset", "optimizer", "schedule"))
LOSS_NORMALIZATIONS, BUFFERS = NAMED["loss_normalization"], NAMED["buffers"]
DROPOUT_MASKS, COMM_HOOKS, DTYPES, AMP = (NAMED[name] for name in ("dropout_masks", "comm_hook", "dtype", "amp"))
PLATFORMS = NAMED["platform"]
TRACKERS = choices_of(KINDS["track"])
BASIC_OPTIMIZERS = get_args(BasicOptimizer)
OVER_ALL_STEPS = ("warmup_cosine", "one_cycle")  # schedules that depend on the number of epochs
GRADIENT_STAGES = ("local", "mean")
POWER_SGD = ("powerSGD", "batched_powerSGD")

IGNORE_INDEX = -100  # label without a loss, torch's default in cross_entropy
# Before the name of a metric that is averaged over another number of elements than the loss.
COUNT_OF = "count:"
RESERVED = ("loss", "count", "grad_norm", "lr", "scale", "skipped")  # metrics that the step computes
DEFAULT_CPU_DEVICES = 2
MOST_CPU_DEVICES = 256  # tried on two cores: 256 train, 1024 wait for each other
DEFAULT_LOCAL_SGD_PERIOD = 4
SPARSER = tuple(400 * 2**k for k in range(23))  # steps from each of which on half as many are logged: 4,873 of 2^31

# Choices with which an option has an effect; with any other choice it is an error.
BELONGS_TO: dict[str, dict[str, tuple[str, ...]]] = {
    "dataset": {
        "data_path": ("names", "npz"),
        **dict.fromkeys(("num_examples", "num_features", "num_classes"), ("linear",)),
        "context_length": ("names",),
    },
    "model": {
        "hidden_sizes": ("mlp", "char_mlp", "convnet"),
        "embedding_size": ("char_mlp",),
        "dropout": ("mlp", "char_mlp", "convnet"),
        **dict.fromkeys(("sync_batch_norm", "buffers"), ("char_mlp", "convnet")),
    },
    "optimizer": {  # the options' names are torch's
        "momentum": ("sgd", "rmsprop"),
        **dict.fromkeys(("dampening", "nesterov"), ("sgd",)),
        "weight_decay": tuple(name for name in OPTIMIZERS if name != "rprop"),
        "betas": ("adam", "adamw", "adamax", "nadam", "radam"),
        "eps": ("adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam"),
        "amsgrad": ("adam", "adamw"),
        "decoupled_weight_decay": ("nadam", "radam"),
        "momentum_decay": ("nadam",),
        "rho": ("adadelta",),
        "alpha": ("rmsprop", "asgd"),
        **dict.fromkeys(("lambd", "t0"), ("asgd",)),
        **dict.fromkeys(("etas", "step_sizes"), ("rprop",)),
        "centered": ("rmsprop",),
        **dict.fromkeys(("lr_decay", "initial_accumulator_value"), ("adagrad",)),
    },
    "schedule": {
        "step_size": ("step",),
        "milestones": ("multi_step",),
        "gamma": ("step", "multi_step", "exponential", "cyclic"),
        "factor": ("constant_factor", "plateau"),
        **dict.fromkeys(("start_factor", "end_factor"), ("linear",)),
        "total_iters": ("constant_factor", "linear", "polynomial"),
        "power": ("polynomial",),
        "t_max": ("cosine",),
        **dict.fromkeys(("t_0", "t_mult"), ("cosine_restarts",)),
        "warmup_steps": ("warmup_cosine",),
        "min_lr": ("cosine", "cosine_restarts", "warmup_cosine", "plateau"),
        **dict.fromkeys(("max_lr", "step_size_up", "step_size_down", "cyclic_mode"), ("cyclic",)),
        "cycle_momentum": ("cyclic", "one_cycle"),
        **dict.fromkeys(("pct_start", "div_factor", "final_div_factor"), ("one_cycle",)),
        **dict.fromkeys(("patience", "threshold", "threshold_mode", "cooldown"), ("plateau",)),
    },
    "comm_hook": {
        **dict.fromkeys(("matrix_approximation_rank", "start_power_sgd_iter"), POWER_SGD),
        "min_compression_rate": ("powerSGD",),
        **dict.fromkeys(("use_error_feedback", "warm_start"), POWER_SGD),
    },
    "amp": dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "growth_interval"), ("fp16",)),
}
OPTIMIZER_OPTIONS = ("lr", "maximize", *BELONGS_TO["optimizer"])
# Schedule -> options without which it means nothing; torch has no default for them either.
NEEDED_BY_SCHEDULE = {
    **{"multi_step": ("milestones",), "exponential": ("gamma",), "cosine_restarts": ("t_0",), "cyclic": ("max_lr",)},
}
# Options of a schedule that torch spells otherwise.
TORCHS_SPELLING = {"t_max": "T_max", "t_0": "T_0", "t_mult": "T_mult", "min_lr": "eta_min", "cyclic_mode": "mode"}
# torch's default learning rates, which the schedules need.
DEFAULT_LR = {
    **dict.fromkeys(("sgd", "adam", "adamw", "radam"), 1e-3),
    **dict.fromkeys(("adamax", "nadam"), 2e-3),
    **dict.fromkeys(("adagrad", "rmsprop", "asgd", "rprop"), 1e-2),
    "adadelta": 1.0,
}

# How `--resume` treats an option whose value has changed. Options in none of these three tuples may change, and a line
# says from which step on: they change the numbers, but the state keeps its meaning.
# Kept: the state or the position in the data depends on the value, or only the first step does.
KEPT_ON_RESUME = (
    *("dataset", "num_examples", "num_features", "num_classes", "context_length"),
    *("model", "hidden_sizes", "embedding_size", "buffers", "weights", "optimizer", "amsgrad", "centered"),
    *("initial_accumulator_value", "dtype", "amp", "init_scale", "freeze", "start_local_sgd_iter", "weights_partial"),
    *("global_batch_size", "steps_per_epoch", "shuffle", "drop_last", "drop_last_batch", "join", "seed", "output"),
    *("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start"),
)
# Kept on or off, because the state has arrays for them: another value is allowed, none is not.
KEPT_ON_OR_OFF_ON_RESUME = ("momentum", "ema_decay", "swa_start")
# Free: they change no number, or say for themselves what they do.
FREE_ON_RESUME = (
    *("data_workers", "verify_data"),
    *("data_path", "print_shards", "steps_per_dispatch", "stall_timeout", "verify_every", "on_nan", "on_drift"),
    *("coordinator", "num_processes", "process_id", "join_timeout", "resume", "checkpoint_every", "keep_checkpoints"),
    *("keep_best", "log_every", "log_gradients", "detect_anomaly", "remat", "evaluate_every", "track"),
    *("early_stopping_patience", "callback_every"),
)


def flag_kinds(config_class: type) -> dict[str, Any]:
    """Return the types of a configuration's fields; where a name is chosen, `check_names` says which one is near.

    >>> flag_kinds(TrainerOptions)["amp"], flag_kinds(TrainerOptions)["lr"]
    (<class 'str'>, typing.Optional[float])
    """
    kinds = get_type_hints(config_class)
    return {name: without_choices(kind) if KINDS.get(name) == kind else kind for name, kind in kinds.items()}
