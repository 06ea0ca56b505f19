"""Every knob of a training run, declared once and validated once.

The same configuration drives `python -m jaxddp.train` and `python -m torch_ref.train`, so
this module knows neither jax nor torch.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxddp.errors import InputError, check_name

MODELS = ("linear", "mlp", "char_mlp", "convnet")
DATASETS = ("digits", "linear", "names", "npz")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
SCHEDULES = ("constant", "step", "warmup_cosine", "one_cycle")
LOSS_NORMALIZATIONS = ("ddp", "global")
COMM_HOOKS = ("allreduce", "bf16_compress", "fp16_compress")
DTYPES = ("float32", "float64")
PLATFORMS = ("cpu", "gpu")

IGNORE_INDEX = -100  # torch's cross_entropy leaves these labels out, and so do we
DEFAULT_CPU_DEVICES = 2

# Which choices an option belongs to; beside any other it would change nothing, so it is refused.
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
        "sync_batch_norm": ("char_mlp", "convnet"),
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
}
OPTIMIZER_OPTIONS = ("lr", "weight_decay", *BELONGS_TO["optimizer"])
# torch's default learning rates: schedules need the number, the optimizers know it themselves.
DEFAULT_LR = {"sgd": 1e-3, "adam": 1e-3, "adamw": 1e-3, "adagrad": 1e-2, "rmsprop": 1e-2}

# What a resumed run must keep: its checkpoint and its place in the data would mean something else.
KEPT_ON_RESUME = (
    *("dataset", "num_examples", "num_features", "num_classes", "context_length"),
    *("model", "hidden_sizes", "embedding_size", "weights", "optimizer", "amsgrad", "centered", "dtype"),
    *("global_batch_size", "shuffle", "drop_last", "drop_last_batch", "seed", "output"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Data-parallel training: one replica of the model per device, gradients averaged.

    Flags left out keep PyTorch's defaults. The same flags work for jaxddp.train and
    torch_ref.train. --traceback shows where in the code an error came from.
    """

    # What is learned.
    dataset: str = "digits"
    """digits | linear | names | npz."""
    data_path: str | None = None
    """names: a text file with one name per line. npz: a file with x_train, y_train, x_test, y_test."""
    num_examples: int = 1000
    """linear: number of training examples."""
    num_features: int = 10
    """linear: length of an input vector."""
    num_classes: int = 3
    """linear: number of labels."""
    context_length: int = 3
    """names: how many characters predict the next one."""

    # The model.
    model: str = "mlp"
    """linear | mlp | char_mlp | convnet."""
    hidden_sizes: tuple[int, ...] | None = None
    """Hidden widths (convnet: channels per stage). None: the model's own (mlp 128 128,
    char_mlp 64, convnet 16 32)."""
    embedding_size: int = 10
    """char_mlp: length of a character's vector."""
    sync_batch_norm: bool = False
    """BatchNorm statistics over all replicas instead of each replica's own."""
    weights: str | None = None
    """Start from this .safetensors file (torch's tensor names) instead of torch's initial weights."""

    # The optimizer. None: torch's default.
    optimizer: str = "adam"
    """sgd | adam | adamw | adagrad | rmsprop."""
    lr: float | None = None
    """Learning rate."""
    momentum: float | None = None
    """sgd, rmsprop."""
    dampening: float | None = None
    """sgd."""
    nesterov: bool = False
    """sgd."""
    weight_decay: float | None = None
    """L2 penalty; adamw: decoupled decay."""
    betas: tuple[float, float] | None = None
    """adam, adamw."""
    eps: float | None = None
    """adam, adamw, adagrad, rmsprop."""
    amsgrad: bool = False
    """adam, adamw."""
    alpha: float | None = None
    """rmsprop: decay of the squared average."""
    centered: bool = False
    """rmsprop."""
    lr_decay: float | None = None
    """adagrad."""
    initial_accumulator_value: float | None = None
    """adagrad."""

    # The learning rate over time, counted in optimizer steps.
    schedule: str = "constant"
    """constant | step | warmup_cosine | one_cycle."""
    step_size: int = 100
    """step: optimizer steps between two decays."""
    gamma: float = 0.1
    """step: factor of each decay."""
    warmup_steps: int = 0
    """warmup_cosine: optimizer steps of linear warm-up from a third of the rate."""
    min_lr: float = 0.0
    """warmup_cosine: rate at the end."""
    cycle_momentum: bool = True
    """one_cycle: let momentum (Adam: beta1) run against the rate, as torch does."""

    # The step.
    epochs: int = 30
    """Passes over the training set."""
    global_batch_size: int = 32
    """Examples per optimizer step, over all replicas and micro-batches; must be divisible by
    replicas x accumulation steps."""
    accumulation_steps: int = 1
    """Micro-batches per replica and optimizer step; one all-reduce for all of them."""
    loss_normalization: str = "ddp"
    """ddp: mean of the replicas' means, as torch DDP. global: sum over all valid elements / their number."""
    comm_hook: str = "allreduce"
    """allreduce | bf16_compress | fp16_compress: how gradients travel between replicas."""
    clip_grad_norm: float | None = None
    """Clip the averaged gradient to this global norm."""
    shuffle: bool = True
    """Shuffle each epoch."""
    drop_last: bool = False
    """Drop the examples that do not fill all replicas instead of repeating the first ones."""
    drop_last_batch: bool = False
    """Leave out an epoch's last step where it is smaller than the others (DataLoader's drop_last)."""
    seed: int = 0
    """Initial weights and sample order; the same numbers as torch draws for it."""
    dtype: str = "float32"
    """float32 | float64."""

    # Where it runs.
    devices: int | None = None
    """Number of replicas. None: all local GPUs, or 2 CPU devices."""
    platform: str | None = None
    """cpu | gpu. None: GPUs where there are any."""
    steps_per_dispatch: int | None = None
    """Optimizer steps compiled into one program call (jaxddp only; the numbers do not change).
    None: up to 32 or --verify-every, or 1 for the convnet on CPU, where loops around convolutions are slow."""
    verify_every: int = 1000
    """Optimizer steps between two checks that all replicas are identical, each at the end of the
    program call that it falls into; 0: only at start and end."""

    # What stays.
    output: str | None = None
    """Run folder for config, metrics, curves, weights and checkpoints."""
    resume: str | None = None
    """Continue the run in this folder; flags beside it override its config, but for model, data and order."""
    checkpoint_every: int = 5
    """Epochs between two checkpoints in the run folder; 0: only at the end."""
    print_shards: bool = False
    """Print which example goes to which replica in each step, and stop."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_ranges()
        self._check_combinations()

    def _check_names(self) -> None:
        check_name("--model", self.model, MODELS)
        check_name("--dataset", self.dataset, DATASETS)
        check_name("--optimizer", self.optimizer, OPTIMIZERS)
        check_name("--schedule", self.schedule, SCHEDULES)
        check_name("--loss-normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        check_name("--comm-hook", self.comm_hook, COMM_HOOKS)
        check_name("--dtype", self.dtype, DTYPES)
        if self.platform is not None:
            check_name("--platform", self.platform, PLATFORMS)

    def _check_ranges(self) -> None:
        at_least_one: tuple[str, ...] = (
            "num_examples",
            "num_features",
            "num_classes",
            "context_length",
            "embedding_size",
        )
        at_least_one += ("step_size", "global_batch_size", "accumulation_steps", "devices", "steps_per_dispatch")
        for name in at_least_one:
            self._check_at_least(name, 1)
        at_least_zero: tuple[str, ...] = ("epochs", "warmup_steps", "verify_every", "checkpoint_every", "seed")
        at_least_zero += ("lr", "momentum", "weight_decay", "eps", "alpha", "lr_decay", "initial_accumulator_value")
        for name in at_least_zero + ("min_lr", "gamma"):
            self._check_at_least(name, 0)
        if self.dampening is not None and not math.isfinite(self.dampening):
            raise InputError(f"--dampening {self.dampening}: must be finite")
        if self.hidden_sizes is not None and any(size < 1 for size in self.hidden_sizes):
            raise InputError(f"{_typed('hidden_sizes', self.hidden_sizes)}: each must be at least 1")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"{_typed('betas', self.betas)}: each must be at least 0 and below 1")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InputError(f"--clip-grad-norm {self.clip_grad_norm}: must be above 0")
        if self.seed + self.epochs > 2**64:  # epoch e is shuffled by seed + e
            raise InputError(f"--seed {self.seed}: must stay below 2**64 over {self.epochs} epochs, as torch's seeds")

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not value >= least:  # so written, NaN fails too
            raise InputError(f"{flag(name)} {value}: must be at least {least}")
        if value == math.inf:
            raise InputError(f"{flag(name)} {value}: must be finite")

    def _check_combinations(self) -> None:
        if self.dataset == "npz" and self.data_path is None:
            raise InputError("--dataset npz: needs --data-path FILE.npz")
        if self.model == "char_mlp" and self.dataset != "names":
            raise InputError(f"--model char_mlp: reads characters, so it needs --dataset names, not {self.dataset}")
        if self.dataset == "names" and self.model != "char_mlp":
            raise InputError(f"--dataset names: holds characters, so it needs --model char_mlp, not {self.model}")
        if self.optimizer == "sgd" and self.nesterov and (not self.momentum or self.dampening):
            raise InputError("--nesterov: needs --momentum above 0 and no --dampening")
        if self.schedule == "one_cycle" and self.cycle_momentum and self.optimizer == "adagrad":
            raise InputError("--schedule one_cycle: adagrad has no momentum to cycle; add --no-cycle-momentum")

    def optimizer_options(self) -> dict[str, Any]:
        """The optimizer options that were set, under torch's names; the rest keep torch's defaults.

        >>> TrainConfig(optimizer="sgd", lr=0.1, nesterov=True, momentum=0.9).optimizer_options()
        {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
        """
        values = {name: getattr(self, name) for name in OPTIMIZER_OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def base_lr(self) -> float:
        """The learning rate that the schedule scales (one_cycle: its peak)."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    def per_replica_batch_size(self, world_size: int) -> int:
        """Examples of one replica and optimizer step; `InputError` if replicas do not divide the batch."""
        parts = world_size * self.accumulation_steps
        if self.global_batch_size % parts:
            lower = self.global_batch_size // parts * parts
            near = f"{lower} or {lower + parts}" if lower else f"{parts}"
            raise InputError(
                f"--global-batch-size {self.global_batch_size}: {world_size} replicas x "
                f"{self.accumulation_steps} accumulation steps do not divide it; {near} would do"
            )
        return self.global_batch_size // world_size

    def check_used(self, beside: "TrainConfig") -> None:
        """Raise `InputError` for an option that is not as in `beside` and yet would change nothing."""
        for choice, options in BELONGS_TO.items():
            for option, takers in options.items():
                value, chosen = getattr(self, option), getattr(self, choice)
                if value != getattr(beside, option) and chosen not in takers:
                    some = " or ".join(filter(None, [", ".join(takers[:-1]), takers[-1]]))
                    raise InputError(f"{_typed(option, value)}: only for {flag(choice)} {some}, not {chosen}")

    def check_resumes(self, saved: "TrainConfig") -> None:
        """Raise `InputError` if this run cannot go on from a checkpoint of `saved`."""
        for name in KEPT_ON_RESUME:
            new, old = getattr(self, name), getattr(saved, name)
            if new != old:
                before = "its default" if old is None else _typed(name, old)
                raise InputError(f"{_typed(name, new)}: the run in {self.resume} goes on with {before} only")


def flag(field: str) -> str:
    """The command-line spelling of a config field.

    >>> flag("global_batch_size")
    '--global-batch-size'
    """
    return "--" + field.replace("_", "-")


def _typed(field: str, value: Any) -> str:
    """A flag and its value as they are typed.

    >>> _typed("hidden_sizes", (8, 0)), _typed("cycle_momentum", False)
    ('--hidden-sizes 8 0', '--no-cycle-momentum')
    """
    if isinstance(value, bool):
        return flag(field if value else f"no_{field}")
    return f"{flag(field)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
