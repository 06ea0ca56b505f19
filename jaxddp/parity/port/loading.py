"""Load ports from programs, and check their fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.config.checks import flag, typed
from jaxddp.config.optimization import Optimizer, Schedule
from jaxddp.config.options import Communication, Parameters
from jaxddp.errors import InputError
from jaxddp.parity.port.port import EVALUATION, Port, missing_names
from jaxddp.parity.port.replaced_files import replace_files
from jaxddp.parity.port.run_batches import RunBatches
from jaxddp.program import Program, bound, check_flags, config_class, default_config, load_program
from jaxddp.program.program import OPTIMIZERS

# Fields that are flags of the trainers too.
OF_CONFIG = ("accumulation_steps", "clip_grad_norm", "clip_grad_value", "loss_normalization")
# Flags of the trainers that a check takes ...
CHECKED = {
    *(f.name for group in (Optimizer, Schedule) for f in fields(group)),
    *(*OF_CONFIG, "epochs", "global_batch_size", "shuffle", "drop_last", "drop_last_batch", "steps_per_epoch"),
    *("data_workers", "verify_data"),
}
# ... and others that change the updates, or what is saved of them.
UNCHECKED = (
    *(f.name for group in (Parameters, Communication) for f in fields(group) if "weights" not in f.name),
    *("remat", "ema_decay", "swa_start", "join", "amp"),
)
BATCHES = {"batch", "torch_batch", "jax_batch"}


class FileError(InputError):
    """A file that cannot be loaded as a port."""


class PortSource(Protocol):
    """A small object that is pickled to another process and makes the port there."""

    @property
    def name(self) -> str:
        """Name in reports; the path, for a file."""

    def port(self) -> Port:
        """Make the port."""


@dataclass(frozen=True)
class PortFile:
    """A port in a file.

    Attributes:
        path: a Python file; see `jaxddp.parity.port`.
        world_size: number of replicas, over which a program's `train_data` are distributed.
        flags: flags of a program, see `load_port`.
        texts: (path, text) of files that are read in place of those in its folder.
    """

    path: str
    world_size: int = 1
    flags: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.path

    def port(self) -> Port:
        """Load the file."""
        replace_files(dict(self.texts), Path(self.path))
        try:
            return load_port(self.path, self.world_size, self.flags)
        except InputError as error:
            raise FileError(f"{error}", error.frames) from error


def config_of(program: Program, flags: Sequence[str]) -> TrainerConfig:
    """Return the configuration that a program's file and flags give, of those that a check takes.

    Raises:
        InputError: a flag is unknown, has a bad value, or has no effect in a check.
    """
    default = default_config(program, TrainerConfig)
    if not flags:
        return default
    config = cli.parse_run(type(default), flags, program.name, default)
    check_flags(program, config)
    options = set() if program.options is None else {f.name for f in fields(program.options)}
    for f in fields(config):
        if (value := getattr(config, f.name)) != getattr(default, f.name) and f.name not in CHECKED | options:
            raise InputError(f"{typed(f.name, value)}: has no effect in a check; leave it out")
    return config


def check_flags_of_port(path: str, flags: Sequence[str], refuse: Callable[[], Any]) -> None:
    """Load a file and check the flags for it.

    Args:
        refuse: called to raise if a flag is neither the file's nor the trainers', or is not a flag.

    Raises:
        InputError: as `config_of`.
    """
    if not flags[0].startswith("-"):
        refuse()
    program = load_program(path)
    known = {flag(f.name) for f in fields(config_class(program, TrainerConfig))}
    if not {word.partition("=")[0].replace("--no-", "--") for word in flags if word.startswith("--")} <= known:
        refuse()
    config_of(program, flags)


def load_port(path: str | Path, world_size: int = 1, flags: Sequence[str] = ()) -> Port:
    """Load a program (see `jaxddp.program`), and make a port of its names.

    The batches of `train_data` are those of both trainers.

    Args:
        world_size: number of replicas, over which a program's `train_data` are distributed.
        flags: those of the file's options and of the trainers, in place of the values that the file gives them.

    Raises:
        InputError: the file is missing, raises, lacks a field, or has a field of the wrong kind; or a flag is wrong.
    """
    program = load_program(path)
    config = config_of(program, flags)
    bound_program = program.bound(config)
    values = {f.name: bound_program.values[f.name] for f in fields(Port) if f.name in program.values}
    steps: dict[str, int] = {}
    values |= {name: getattr(config, name) for name in OF_CONFIG}
    left_out = [name for name in UNCHECKED if getattr(config, name) != getattr(TrainerConfig, name)]
    left_out += ["schedule"] if config.schedule == "plateau" else []  # it waits for metrics
    values["unchecked"] = tuple(typed(name, getattr(config, name)) for name in left_out)
    if "optimizer" in program.defaults or (program.get("train_data") and not {*OPTIMIZERS} & program.values.keys()):
        values["optimizer"] = config.with_scaled_lr(world_size)
    if program.get("train_data") is not None and not BATCHES & program.values.keys():
        batches = RunBatches(bound_program, config, world_size)
        values |= {"torch_batch": batches.torch_batch, "jax_batch": batches.jax_batch}
        per_epoch = batches.steps_per_epoch
        steps = {"steps_per_epoch": per_epoch, "total_steps": config.total_steps(per_epoch)}
        values |= {"test_data": batches.test_data} if values.get("test_data") is not None else {}
    values = steps | values
    if missing := missing_names([name for name, value in values.items() if value is not None]):
        raise InputError(f"{path}: has no {', '.join(missing)}")
    try:
        given = {name: steps if name in EVALUATION else {"train": True, **steps} for name in values}
        return Port(**{name: bound(value, **given[name]) for name, value in values.items()})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
