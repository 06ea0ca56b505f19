"""Every knob of a training run, declared once and validated once.

The same configuration drives `python -m jaxddp.train` and `python -m torch_ref.train`, so
this module knows neither jax nor torch.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from jaxddp.errors import InputError, check_name

MODELS = ("linear", "mlp", "char_mlp", "convnet")
DATASETS = ("digits", "linear", "names", "npz")
SCHEDULES = ("constant", "step", "warmup_cosine", "one_cycle")
LOSS_NORMALIZATIONS = ("ddp", "global")
DTYPES = ("float32", "float64")
PLATFORMS = ("cpu", "gpu")

CONFIG_FILE = "config.json"  # of a run folder
IGNORE_INDEX = -100  # torch's cross_entropy leaves these labels out, and so do we
DEFAULT_CPU_DEVICES = 2

# Which of the optimizer options below each optimizer takes; the names are torch's.
OPTIMIZER_OPTIONS = {
    "sgd": ("lr", "momentum", "dampening", "nesterov", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "adamw": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"),
    "rmsprop": ("lr", "alpha", "momentum", "centered", "eps", "weight_decay"),
}
OPTIMIZERS = tuple(OPTIMIZER_OPTIONS)
# torch's default learning rates: schedules need the number, the optimizers know it themselves.
DEFAULT_LR = {"sgd": 1e-3, "adam": 1e-3, "adamw": 1e-3, "adagrad": 1e-2, "rmsprop": 1e-2}

# What a resumed run must keep: its checkpoint and its place in the data would mean something else.
KEPT_ON_RESUME = (
    *("dataset", "num_examples", "num_features", "num_classes", "context_length"),
    *("model", "hidden_sizes", "embedding_size", "optimizer", "amsgrad", "centered", "dtype"),
    *("global_batch_size", "shuffle", "drop_last", "drop_last_batch", "seed", "output"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Data-parallel training: one replica of the model per device, gradients averaged.

    Flags left out keep PyTorch's defaults. The same flags work for jaxddp.train and
    torch_ref.train.
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
    None: up to 32, or 1 for the convnet on CPU, where loops around convolutions are slow."""
    verify_every: int = 1000
    """Optimizer steps between two checks that all replicas are identical; 0: only at start and end."""

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
        self._check_optimizer()

    def _check_names(self) -> None:
        check_name("--model", self.model, MODELS)
        check_name("--dataset", self.dataset, DATASETS)
        check_name("--optimizer", self.optimizer, OPTIMIZERS)
        check_name("--schedule", self.schedule, SCHEDULES)
        check_name("--loss-normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        check_name("--dtype", self.dtype, DTYPES)
        if self.platform is not None:
            check_name("--platform", self.platform, PLATFORMS)
        if self.dataset == "npz" and self.data_path is None:
            raise InputError("--dataset npz: needs --data-path FILE.npz")
        if self.data_path is not None and self.dataset not in ("npz", "names"):
            raise InputError(f"--data-path {self.data_path}: only for --dataset names or npz, not {self.dataset}")
        if self.model == "char_mlp" and self.dataset != "names":
            raise InputError(f"--model char_mlp: reads characters, so it needs --dataset names, not {self.dataset}")
        if self.dataset == "names" and self.model != "char_mlp":
            raise InputError(f"--dataset names: holds characters, so it needs --model char_mlp, not {self.model}")

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
        if self.hidden_sizes is not None and any(size < 1 for size in self.hidden_sizes):
            raise InputError(f"--hidden-sizes {' '.join(map(str, self.hidden_sizes))}: each must be at least 1")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"--betas {self.betas[0]} {self.betas[1]}: each must be at least 0 and below 1")
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

    def _check_optimizer(self) -> None:
        """Refuse options that the chosen optimizer does not have, as torch's constructors do."""
        every_option = sorted({option for options in OPTIMIZER_OPTIONS.values() for option in options})
        for option in every_option:
            if option in self.optimizer_options() and option not in OPTIMIZER_OPTIONS[self.optimizer]:
                takers = ", ".join(name for name, options in OPTIMIZER_OPTIONS.items() if option in options)
                raise InputError(f"{flag(option)}: --optimizer {self.optimizer} has no such option; {takers} have")
        if self.nesterov and (not self.momentum or self.dampening):
            raise InputError("--nesterov: needs --momentum above 0 and no --dampening")
        if self.schedule == "one_cycle" and self.cycle_momentum and self.optimizer == "adagrad":
            raise InputError("--schedule one_cycle: adagrad has no momentum to cycle; add --no-cycle-momentum")

    def optimizer_options(self) -> dict[str, Any]:
        """The optimizer options that were set, under torch's names; the rest keep torch's defaults.

        >>> TrainConfig(optimizer="sgd", lr=0.1, nesterov=True, momentum=0.9).optimizer_options()
        {'lr': 0.1, 'momentum': 0.9, 'nesterov': True}
        """
        names = dict.fromkeys(option for options in OPTIMIZER_OPTIONS.values() for option in options)
        values = {name: getattr(self, name) for name in names}
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

    def check_resumes(self, saved: "TrainConfig") -> None:
        """Raise `InputError` if this run cannot go on from a checkpoint of `saved`."""
        for name in KEPT_ON_RESUME:
            new, old = getattr(self, name), getattr(saved, name)
            if new != old:
                raise InputError(f"{flag(name)} {new}: the run in {self.resume} has {old}, and must go on with it")

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        if self.data_path is not None:
            fields["data_path"] = str(Path(self.data_path).resolve())  # the run may be resumed from elsewhere
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a saved config; `InputError` names the file and the field that is wrong."""
        try:
            fields = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a run's config ({error})") from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or not fields.keys() <= known:
            unknown = sorted(fields.keys() - known) if isinstance(fields, dict) else type(fields).__name__
            raise InputError(f"{path}: not a run's config (unknown: {unknown})")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        kinds = get_type_hints(cls)
        wrong = [f"{name} is {json.dumps(fields[name])}" for name in values if not _fits(values[name], kinds[name])]
        if wrong:
            raise InputError(f"{path}: not a run's config (wrong type: {', '.join(wrong)})")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON has a field's type; an integer will do for a float."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        if isinstance(value, tuple) and parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    return type(value) in ((int, float) if kind is float else (kind,))  # so written, true is no integer


def flag(field: str) -> str:
    """The command-line spelling of a config field.

    >>> flag("global_batch_size")
    '--global-batch-size'
    """
    return "--" + field.replace("_", "-")
