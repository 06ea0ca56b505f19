"""Values of the named options of a training run, and the choices that each option belongs to."""

MODELS = ("linear", "mlp", "char_mlp", "convnet")
DATASETS = ("digits", "linear", "names", "npz")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
SCHEDULES = ("constant", "step", "warmup_cosine", "one_cycle")
OVER_ALL_STEPS = ("warmup_cosine", "one_cycle")  # schedules that depend on the number of epochs
LOSS_NORMALIZATIONS = ("ddp", "global")
LR_SCALINGS = ("none", "linear", "sqrt")
BUFFERS = ("rank0", "mean", "local")
GRADIENT_STAGES = ("local", "mean")
DROPOUT_MASKS = ("replica", "shared", "example")
POWER_SGD = ("powerSGD", "batched_powerSGD")
COMM_HOOKS = ("allreduce", "bf16_compress", "fp16_compress", *POWER_SGD)
DTYPES = ("float32", "float64")
AMP = ("none", "bf16", "fp16")
PLATFORMS = ("cpu", "gpu")
ON_NAN = ("stop", "skip", "rollback")
ON_DRIFT = ("stop", "repair")

# Option -> its choices, checked in this order.
NAMED: dict[str, tuple[str, ...]] = {
    **{"model": MODELS, "dataset": DATASETS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES},
    **{"loss_normalization": LOSS_NORMALIZATIONS, "lr_scaling": LR_SCALINGS, "buffers": BUFFERS},
    **{"dropout_masks": DROPOUT_MASKS, "comm_hook": COMM_HOOKS, "dtype": DTYPES, "amp": AMP},
    **{"on_nan": ON_NAN, "on_drift": ON_DRIFT, "platform": PLATFORMS},
}

IGNORE_INDEX = -100  # label without a loss, torch's default in cross_entropy
DEFAULT_CPU_DEVICES = 2
MOST_CPU_DEVICES = 256  # tried on two cores: 256 train, 1024 wait for each other
DEFAULT_LOCAL_SGD_PERIOD = 4

# Choices with which an option has an effect; with any other choice it is an error.
BELONGS_TO: dict[str, dict[str, tuple[str, ...]]] = {
    "dataset": {
        "data_path": ("names", "npz"),
        "num_examples": ("linear",),
        "num_features": ("linear",),
        "num_classes": ("linear",),
        "context_length": ("names",),
    },
    "model": {
        "hidden_sizes": ("mlp", "char_mlp", "convnet"),
        "embedding_size": ("char_mlp",),
        "dropout": ("mlp", "char_mlp", "convnet"),
        "sync_batch_norm": ("char_mlp", "convnet"),
        "buffers": ("char_mlp", "convnet"),
    },
    "optimizer": {  # the options' names are torch's
        "momentum": ("sgd", "rmsprop"),
        "dampening": ("sgd",),
        "nesterov": ("sgd",),
        "betas": ("adam", "adamw"),
        "eps": ("adam", "adamw", "adagrad", "rmsprop"),
        "amsgrad": ("adam", "adamw"),
        "alpha": ("rmsprop",),
        "centered": ("rmsprop",),
        "lr_decay": ("adagrad",),
        "initial_accumulator_value": ("adagrad",),
    },
    "schedule": {
        "step_size": ("step",),
        "gamma": ("step",),
        "warmup_steps": ("warmup_cosine",),
        "min_lr": ("warmup_cosine",),
        "cycle_momentum": ("one_cycle",),
    },
    "comm_hook": {
        "matrix_approximation_rank": POWER_SGD,
        "start_power_sgd_iter": POWER_SGD,
        "min_compression_rate": ("powerSGD",),
        "use_error_feedback": POWER_SGD,
        "warm_start": POWER_SGD,
    },
    "amp": {
        "init_scale": ("fp16",),
        "growth_factor": ("fp16",),
        "backoff_factor": ("fp16",),
        "growth_interval": ("fp16",),
    },
}
OPTIMIZER_OPTIONS = ("lr", "weight_decay", *BELONGS_TO["optimizer"])
# torch's default learning rates, which the schedules need.
DEFAULT_LR = {"sgd": 1e-3, "adam": 1e-3, "adamw": 1e-3, "adagrad": 1e-2, "rmsprop": 1e-2}

# How `--resume` treats an option whose value has changed. Options in none of these three tuples may change, and a line
# says from which step on: they change the numbers, but the state keeps its meaning.
# Kept: the state or the position in the data depends on the value, or only the first step does.
KEPT_ON_RESUME = (
    *("dataset", "num_examples", "num_features", "num_classes", "context_length"),
    *("model", "hidden_sizes", "embedding_size", "buffers", "weights", "optimizer", "amsgrad", "centered"),
    *("initial_accumulator_value", "dtype", "amp", "init_scale", "freeze", "start_local_sgd_iter"),
    *("global_batch_size", "shuffle", "drop_last", "drop_last_batch", "join", "seed", "output"),
    *("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start"),
)
# Kept on or off, because the state has arrays for them: another value is allowed, none is not.
KEPT_ON_OR_OFF_ON_RESUME = ("momentum", "ema_decay")
# Free: they change no number, or say for themselves what they do.
FREE_ON_RESUME = (
    *("data_path", "print_shards", "steps_per_dispatch", "stall_timeout", "verify_every", "on_nan", "on_drift"),
    *("coordinator", "num_processes", "process_id", "join_timeout", "resume", "checkpoint_every", "keep_checkpoints"),
    *("keep_best", "log_every", "log_gradients", "detect_anomaly"),
)
