"""The configuration of a program's run: the trainer's options, with the program's own and its defaults."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from jaxddp.config import TrainerConfig
from jaxddp.config.checks import flag, typed
from jaxddp.config.kinds import UNIONS, described, fits, plain
from jaxddp.errors import InputError
from jaxddp.program.loading import load_program
from jaxddp.program.program import OPTIONS, Program, replaced_flags

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
Trainer = TypeVar("Trainer", bound=TrainerConfig)
# Names that an option cannot have in addition to those of the configuration: flags of every command, and of torch_ref.
OF_COMMANDS = ("help", "traceback", "strategy", "LEFT_OUT", "OPTIONS", "PROGRAM")


def config_class(program: Program, trainer: type[Config]) -> type[Config]:
    """Return the class of a run's configurations: the trainer's options, and the program's.

    Args:
        trainer: `TrainerConfig`, or that of torch_ref.

    Raises:
        InputError: an option of the program is named like a flag of the trainer, or has no default.

    >>> from jaxddp.program import built_in
    >>> config_class(built_in(), TrainerConfig)(model="linear", epochs=2).model
    'linear'
    """
    own = [] if program.options is None else [f for f in dataclasses.fields(program.options) if f.init]
    kinds = program.option_kinds
    negated = [f"no_{f.name}" for f in dataclasses.fields(trainer) if isinstance(f.default, bool)]
    for f in own:
        where = f"{program.name}: {OPTIONS}.{f.name}"
        if hasattr(trainer, f.name) or f.name in (*negated, *OF_COMMANDS):  # also a value derived from flags
            raise InputError(f"{where}: is a name of the trainer; choose another")
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}: has no default; give it one")
        if not _is_plain(kinds[f.name]):
            raise InputError(f"{where}: must be bool, int, float, str, Path, Literal, None, or a tuple or list of them")
        if not fits(_default(f), kinds[f.name]):
            raise InputError(f"{where} = {_default(f)!r}: must be {described(kinds[f.name])}")
    if known := [kind for kind in trainer.__subclasses__() if program.options and issubclass(kind, program.options)]:
        return known[0]
    fields = [(f.name, kinds[f.name], dataclasses.field(default=_default(f))) for f in own]

    def make_plain(config: Any) -> None:  # as config.json has them
        for name in kinds:
            object.__setattr__(config, name, plain(getattr(config, name)))
        super(made, config).__post_init__()

    names = {"OPTIONS": program.options, "PROGRAM": program, "__doc__": trainer.__doc__, "__reduce__": _reduced}
    names["__post_init__"] = make_plain
    made: Any = dataclasses.make_dataclass(trainer.__name__, fields, bases=(trainer,), namespace=names, frozen=True)
    return made


def default_config(program: Program, trainer: type[Trainer]) -> Trainer:
    """Return the configuration of a run without flags: the file's values in place of the trainer's.

    Raises:
        InputError: the values contradict each other.
    """
    made, left_out = config_class(program, trainer), getattr(trainer, "LEFT_OUT", ())
    with as_written(program):
        config = made(**{name: value for name, value in program.defaults.items() if name not in left_out})
        config.check_used(baseline=made())
        return config


@contextlib.contextmanager
def as_written(program: Program, names: Collection[str] | None = None) -> Iterator[None]:
    """Begin the message of an `InputError` about a flag that a file sets with the file and the file's name of the flag.

    Args:
        names: flags; an error about others passes as it is. None: any error is about the file.
    """
    try:
        yield
    except InputError as error:
        message = str(error)
        if names is not None and not any(f"{flag(name)} " in f"{message} " for name in names):
            raise
        for name in (*program.defaults, *program.option_kinds):
            message = message.replace(f"{flag(name)} ", f"{name} ")
        raise InputError(f"{program.name}: {message}") from None


def check_flags(program: Program, config: TrainerConfig) -> None:
    """Raise `InputError` for a flag that has no effect, because the file has its step or its optimizer for itself."""
    for name, function in replaced_flags(program.values).items():
        if (value := getattr(config, name)) != getattr(TrainerConfig, name):
            raise InputError(f"{typed(name, value)}: has no effect, because {program.name} has {function}")


def _default(f: Any) -> Any:
    return plain(f.default if f.default is not dataclasses.MISSING else f.default_factory())


def _is_plain(kind: Any) -> bool:
    origin, parts = get_origin(kind) or kind, [part for part in get_args(kind) if part is not Ellipsis]
    if origin is Literal:
        parts = list(map(type, parts))
    nested = origin in (tuple, list, Literal, *UNIONS)
    return all(map(_is_plain, parts)) if nested else kind in (bool, int, float, str, NoneType, Path)


def _reduced(config: Any) -> Any:
    """Pickle a configuration by its program's file, which the other process loads again."""
    program = config.PROGRAM
    if program.path is None:
        raise InputError(f"{program.name}: must be a file to be run by several processes")
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return _rebuilt, (str(program.path), type(config).__bases__[0], values)


def _rebuilt(path: str, trainer: type[Config], values: dict[str, Any]) -> Config:
    return config_class(_loaded(path), trainer)(**values)


@cache
def _loaded(path: str) -> Program:
    return load_program(path)
