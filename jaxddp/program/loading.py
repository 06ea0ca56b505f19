"""Load a program from a run file, a module or a namespace, and check the spelling of its names."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import OPTIMIZER_OPTIONS
from jaxddp.config.kinds import described, fits, plain
from jaxddp.config.options import Schedule
from jaxddp.errors import InputError
from jaxddp.program.program import NAMES, OF_OPTIMIZER, OF_STEP, OPTIMIZERS, OPTIONS, STEPS, Program
from jaxddp.scripts import run_file

BUILT_IN = "jaxddp.programs.classifier"
MIN_LENGTH, SIMILARITY = 8, 0.85  # least values at which a name counts as a misspelt one
PLAIN = (bool, int, float, str, tuple)  # kinds of values that can set a flag
# Flags that tell of one run, or of one machine, and not of a program.
OF_A_RUN = ("output", "resume", "coordinator", "num_processes", "process_id", "print_shards")
# Flags that are fields of a port too.
OF_PORT = (
    "optimizer",
    "accumulation_steps",
    "clip_grad_norm",
    "clip_grad_value",
    "loss_normalization",
    "steps_per_epoch",
)


def program_of(source: Any) -> Program:
    """Return a program.

    Args:
        source: a path, a module, a mapping of names, any object with them as attributes, or a `Program`.

    Raises:
        InputError: see `load_program`.
    """
    if isinstance(source, Program):
        return source
    if isinstance(source, str | Path):
        return load_program(source)
    values = dict(source) if isinstance(source, Mapping) else {n: getattr(source, n) for n in dir(source)}
    return _program(getattr(source, "__name__", type(source).__name__), values)


def load_program(path: str | Path) -> Program:
    """Run a file (see `jaxddp.scripts.run_file`) and make a program of its top-level names.

    Raises:
        InputError: the file is missing, raises, or gives a name a value of the wrong kind.
    """
    absolute = Path(path).absolute()  # the file may change the working directory
    module = run_file(Path(path))
    program = _program(str(path), vars(module), module)
    return dataclasses.replace(program, path=absolute)


@cache
def built_in() -> Program:
    """Return the program that the trainers run if they are given no file."""
    return program_of(import_module(BUILT_IN))


def _program(name: str, values: Mapping[str, Any], module: ModuleType | None = None) -> Program:
    try:
        defaults = _defaults(values)
        if module is not None:
            _check_spelling(module, values.keys())
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return Program(name, {n: values[n] for n in NAMES if n in values}, defaults, values.get(OPTIONS))


def _defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainers' flags that the names of a file set; `optimizer` may hold several in a `TrainConfig`.

    >>> sgd = TrainerConfig(optimizer="sgd", lr=0.1)
    >>> _defaults({"epochs": 3, "optimizer": sgd, "lr": 0.2, "output": "runs/a", "train_data": dict})
    {'optimizer': 'sgd', 'lr': 0.2, 'epochs': 3}
    >>> _defaults({"epochs": 3, "optimizer": sgd, "lr": 0.2})
    {'optimizer': 'sgd', 'lr': 0.1}
    """
    given: dict[str, Any] = {}
    chosen = values.get("optimizer")
    if isinstance(chosen, TrainerConfig):
        names = ("optimizer", *OPTIMIZER_OPTIONS, *(f.name for f in dataclasses.fields(Schedule)))
        given = {n: getattr(chosen, n) for n in names if getattr(chosen, n) != getattr(TrainerConfig, n)}
    kinds, variables = get_type_hints(TrainerConfig), _variables(values)
    for f in dataclasses.fields(TrainerConfig):
        value = plain(values.get(f.name))
        if f.name in variables or not (isinstance(value, PLAIN) or (value is None and f.name in values)):
            continue
        if not fits(value, kinds[f.name]):
            raise InputError(f"{f.name} = {value!r}: is a flag of the trainers, and must be {described(kinds[f.name])}")
        given[f.name] = value
    return given


def _variables(values: Mapping[str, Any]) -> set[str]:
    """Return the names of flags that set no flag in this file, but are variables of its code.

    A port file without data for a trainer has only the flags that a check needs. An optimizer or a step of the file's
    replaces the flags beside it; those that a check refuses there remain.
    """
    flags = {f.name for f in dataclasses.fields(TrainerConfig)}
    variables = {*OF_A_RUN} if values.get("train_data") else flags - {*OF_PORT}
    for functions, names in ((STEPS, OF_STEP), (OPTIMIZERS, OF_OPTIMIZER)):
        variables |= {*names} - {*OF_PORT} if any(map(values.get, functions)) else set()
    return variables


def _check_spelling(module: ModuleType, given: Collection[str]) -> None:
    """Raise if a name is almost one that the trainers know, which would silently keep its default."""
    known = {*NAMES, *(f.name for f in dataclasses.fields(TrainerConfig))}
    absent = [name for name in known if name not in given and len(name) >= MIN_LENGTH]
    for name, value in vars(module).items():
        near = difflib.get_close_matches(name, absent, n=1, cutoff=SIMILARITY)
        imported = isinstance(value, ModuleType) or getattr(value, "__module__", module.__name__) != module.__name__
        if near and name not in known and not name.startswith("_") and not imported:
            raise InputError(f"{name}: not a name of a run file; did you mean {near[0]}?")
