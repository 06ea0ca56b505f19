"""A program: models, losses, optimizers and data of a run, in one framework or in both, without their training loop."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from jaxddp.config.choices import OPTIMIZER_OPTIONS
from jaxddp.config.kinds import restored
from jaxddp.config.optimization import Schedule
from jaxddp.errors import InputError
from jaxddp.program.calls import asks_for, bound, located, reads
from jaxddp.scripts import errors_located

# Names of functions, by the side that needs them; "both" holds for either framework.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "jax": ("jax_model", "jax_loss", "jax_step", "jax_batch", "jax_start", "jax_restore", "jax_metrics"),
    "torch": ("torch_model", "torch_loss", "torch_step", "torch_batch", "torch_optimizer", "torch_scheduler")
    + ("configure_optimizers", "torch_metrics"),
    "both": ("train_data", "test_data", "augment", "collate", "sampler", "batch", "predict", "metrics", "title")
    + ("on_epoch_end", "on_step_end"),
}
# Names of values of any kind, and of functions or objects.
VALUES = (
    *("jax_optimizer", "names", "transpose_kernel", "no_twin", "torch_clip_grad_norm", "find_unused_parameters"),
    *("steps_per_epoch", "total_steps", "restore_at", "intended"),
)
NAMES = (*(name for names in FUNCTIONS.values() for name in names), *VALUES)
OPTIONS = "Options"
STEPS = ("jax_step", "torch_step")
OPTIMIZERS = ("jax_optimizer", "torch_optimizer", "configure_optimizers")
# Flags that the file's step replaces, and flags that its optimizer replaces.
OF_STEP = (
    *("accumulation_steps", "loss_normalization", "clip_grad_norm", "clip_grad_value", "remat", "ema_decay", "freeze"),
    *("dropout_masks", "amp", "swa_start", "swa_lr"),
    *("buffers", "comm_hook", "start_local_sgd_iter", "shard_optimizer", "join", "log_gradients", "detect_anomaly"),
    "sync_batch_norm",
)
OF_SCHEDULE = tuple(f.name for f in dataclasses.fields(Schedule))
OF_OPTIMIZER = tuple(dict.fromkeys(("optimizer", "lr", "lr_scaling", *OPTIMIZER_OPTIONS, *OF_SCHEDULE)))


def read_flags(values: Mapping[str, Any]) -> set[str]:
    """Return the flags that the file's step or optimizer reads from `config`, and which so have an effect."""
    return {name for kind in (*STEPS, *OPTIMIZERS) for name in reads(values.get(kind), {*OF_STEP, *OF_OPTIMIZER})}


def replaced_flags(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags that the file's step or optimizer replaces, with its name; flags that it reads stay.

    >>> flags = replaced_flags({"jax_optimizer": lambda config: config.lr})
    >>> "lr" in flags, flags["momentum"]
    (False, 'jax_optimizer')
    """
    replaced: dict[str, str] = {}
    read = read_flags(values)
    for functions, names in ((STEPS, OF_STEP), (OPTIMIZERS, OF_OPTIMIZER)):
        given = [function for function in functions if values.get(function)]
        replaced |= {name: given[0] for name in names if given and name not in read}
    return replaced


@dataclass(frozen=True)
class Program:
    """Functions and values of a program by name; see `jaxddp.program`.

    Attributes:
        name: its path, or the name of its module, for messages.
        values: what the file gives, by the names in `NAMES`.
        defaults: the trainers' flags that the file sets, by name.
        options: dataclass of its options; None: it has none.
        path: the file; None: a module or a namespace.

    >>> Program("run.py", {"jax_model": lambda: "a model"}).need("jax_model", "jax_loss")
    Traceback (most recent call last):
    jaxddp.errors.InputError: run.py: has no jax_loss
    """

    name: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: type | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in self.values.keys() & {name for names in FUNCTIONS.values() for name in names}:
            if self.values[name] is not None and not callable(self.values[name]):
                raise InputError(f"{self.name}: {name}: must be a function, and is {type(self.values[name]).__name__}")
        if self.options is not None and not dataclasses.is_dataclass(self.options):
            raise InputError(f"{self.name}: {OPTIONS}: must be a dataclass")
        for name, value in self.values.items():
            if self.options is None and asks_for(value, "options"):
                raise InputError(f"{self.name}: {name} takes options, and the file has no dataclass {OPTIONS}")

    @property
    def stem(self) -> str:
        """Name of the file or module, without folders and suffix, as an identifier."""
        stem = self.path.stem if self.path is not None else self.name.rpartition(".")[2]
        return stem if stem.isidentifier() else "program"

    @property
    def file_name(self) -> str | None:
        """Path of the file as it was given; None without a file."""
        return None if self.path is None else self.name

    @property
    def option_kinds(self) -> dict[str, Any]:
        """Types of the options by name."""
        if self.options is None:
            return {}
        try:
            kinds = get_type_hints(self.options)
        except NameError as error:
            raise InputError(f"{self.name}: {OPTIONS}: {error}") from None
        return {f.name: kinds[f.name] for f in dataclasses.fields(self.options) if f.init}

    def get(self, name: str, default: Any = None) -> Any:
        """Return what the file gives under a name, or the default."""
        assert name in NAMES, name
        value = self.values.get(name)
        return default if value is None else value

    def need(self, *names: str, reason: str = "") -> tuple[Any, ...]:
        """Return what the file gives under these names.

        Args:
            reason: continuation of the message, as ", which jaxddp.train needs".

        Raises:
            InputError: the file lacks one of them.
        """
        if missing := [name for name in names if self.get(name) is None]:
            raise InputError(f"{self.name}: has no {', '.join(missing)}{reason}")
        return tuple(self.get(name) for name in names)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Prefix the message of an `InputError` about one of the program's names with the file."""
        try:
            yield
        except InputError as error:
            if str(error).partition(":")[0] in NAMES:
                raise InputError(f"{self.name}: {error}") from error
            raise

    def bound(self, config: Any) -> "Program":
        """Return the program with its functions bound to `options` and to `config`, whose `lr` is the base rate."""
        given = {"config": dataclasses.replace(config, lr=config.base_lr)}
        if self.options is not None:
            values = {name: restored(getattr(config, name), kind) for name, kind in self.option_kinds.items()}
            with errors_located(self.path) if self.path else nullcontext():  # its __post_init__ may raise
                given["options"] = self.options(**values)
        return dataclasses.replace(self, values={name: bound(value, **given) for name, value in self.values.items()})

    def located(self) -> "Program":
        """Return the program whose functions turn what they raise into one line with file and line."""
        if self.path is None:
            return self
        values = {name: located(value, self.path) for name, value in self.values.items()}
        return dataclasses.replace(self, values=values)
