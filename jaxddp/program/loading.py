"""Load a program from a file, a module or a namespace, and check the spelling of its names."""

import ast
import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxddp.config import TrainerConfig
from jaxddp.config.choices import OPTIMIZER_OPTIONS, flag_kinds
from jaxddp.config.kinds import described, fits, plain
from jaxddp.config.options import Schedule
from jaxddp.errors import InputError, shortened
from jaxddp.program.program import NAMES, OPTIONS, Program, read_flags, replaced_flags
from jaxddp.scripts import run_file

BUILT_IN = "jaxddp.programs.classifier"
MIN_LENGTH, SIMILARITY = 6, 0.85  # least values at which a name counts as a misspelt one
# Words of other trainers for the names of a program.
SYNONYMS = {
    "test_data": ("val_data", "valid_data", "validation_data", "eval_data", "dev_data", "val_dataset", "test_dataset"),
    "train_data": ("train_dataset", "training_data"),
    **dict.fromkeys(("jax_loss", "torch_loss"), ("loss_fn",)),
    **{"epochs": ("num_epochs", "n_epochs", "max_epochs"), "global_batch_size": ("batch_size",)},
    **{"lr": ("learning_rate",), "collate": ("collate_fn",), "clip_grad_norm": ("max_grad_norm", "grad_clip")},
    "accumulation_steps": ("gradient_accumulation_steps", "accumulate_grad_batches"),
}
# What an object is for that is no value of a flag.
ADVICE = {
    "schedule": "; an Optax schedule goes into jax_optimizer",
    "optimizer": "; an Optax optimizer is called jax_optimizer",
    "dtype": '; 16 bits are amp = "bf16" or "fp16"',
}
PLAIN = (bool, int, float, str, tuple)  # kinds of values that can set a flag
# Flags that tell of one run, or of one machine, and not of a program.
OF_A_RUN = ("output", "resume", "coordinator", "num_processes", "process_id", "print_shards")
# Flags that are fields of a port too.
OF_PORT = (
    *("optimizer", "accumulation_steps", "clip_grad_norm", "clip_grad_value", "loss_normalization", "steps_per_epoch"),
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
    in_file = isinstance(source, ModuleType) and (getattr(source, "__file__", None) or "").endswith(".py")
    return _program(getattr(source, "__name__", type(source).__name__), values, source if in_file else None)


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
        _check_former_names(values)
        unused = {} if module is None else _unused(module)
        defaults = _defaults(values, unused)
        _check_spelling(values, unused)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return Program(name, {n: values[n] for n in NAMES if n in values}, defaults, values.get(OPTIONS))


def _defaults(values: Mapping[str, Any], unused: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """Return the trainers' flags that the names of a file set; `optimizer` may hold several in a `TrainConfig`.

    Args:
        unused: see `_unused`; what is made for no use in the file must be meant as a flag.

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
    kinds, variables = flag_kinds(TrainerConfig), _variables(values)
    for name in (f.name for f in dataclasses.fields(TrainerConfig) if f.name in values and f.name not in variables):
        value = plain(values[name])
        is_flag = value is None or type(value) in PLAIN
        if not is_flag and (not (unused or {}).get(name) or isinstance(value, TrainerConfig)):
            continue
        if not fits(value, kinds[name]):
            shown = f"{value!r}" if is_flag else getattr(value, "__name__", None) or shortened(f"{value}", 40)
            advice = "" if is_flag else ADVICE.get(name, "")
            must = f"is a flag of the trainers, and must be {described(kinds[name])}{advice}"
            raise InputError(f"{name} = {shown}: {must}")
        given[name] = value
    return given


def _variables(values: Mapping[str, Any]) -> set[str]:
    """Return the names of flags that set no flag in this file, but are variables of its code.

    A program without data for a trainer has only the flags that a check needs. An optimizer or a step of the file
    replaces the flags of the same purpose; those that a check then refuses remain.
    """
    flags = {f.name for f in dataclasses.fields(TrainerConfig)}
    variables = {*OF_A_RUN} if values.get("train_data") else flags - {*OF_PORT} - read_flags(values)
    return variables | (replaced_flags(values).keys() - {*OF_PORT})


def _unused(module: ModuleType) -> dict[str, bool]:
    """Return the names of a file that its code does not use, and whether they are made there, and not imported."""
    nodes = list(ast.walk(ast.parse(Path(module.__file__ or "").read_bytes())))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    made = {node.id for node in nodes if isinstance(node, ast.Name)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = {n for n, value in vars(module).items() if not isinstance(value, ModuleType) and not n.startswith("_")}
    return {name: name in made for name in sorted(names - used)}


def _check_former_names(values: Mapping[str, Any]) -> None:
    """Raise if a file has the name that a function or an optimizer had before it was called `jax_...`."""
    for name in (name for name in NAMES if name.startswith("jax_") and name not in values):
        if (former := name.replace("jax_", "flax_", 1)) in values:
            raise InputError(f"{former}: must be called {name}, as the model may be Haiku's or Equinox's too")


def _check_spelling(values: Mapping[str, Any], unused: Mapping[str, bool]) -> None:
    """Raise if an unused name is almost one that the trainers know, or another word for it, whose default would stay.

    Args:
        unused: see `_unused`; what is imported is spelt like its module.
    """
    known = {*NAMES, *(f.name for f in dataclasses.fields(TrainerConfig))} - _variables(values)
    absent = [name for name in known if name not in values and len(name) >= MIN_LENGTH]
    for name in unused.keys() - known:
        near = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=SIMILARITY) if unused[name] else []
        meant = [n for n, words in SYNONYMS.items() if name in words and n in known]
        if near or (meant and not values.keys() & meant):
            raise InputError(f"{name}: not a name of a program; did you mean {' or '.join(near or meant)}?")
