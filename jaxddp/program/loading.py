"""Load a program from a run file, a module or a namespace, and check the spelling of its names."""

import ast
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
from jaxddp.errors import InputError, shortened
from jaxddp.program.program import NAMES, OPTIONS, Program, replaced_flags
from jaxddp.scripts import run_file

BUILT_IN = "jaxddp.programs.classifier"
MIN_LENGTH, SIMILARITY = 6, 0.85  # least values at which a name counts as a misspelt one
# Names of other trainers, and those of a run file for the same.
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("val_data", "valid_data", "validation_data", "eval_data", "dev_data"), ("test_data",)),
    **dict.fromkeys(("val_dataset", "valid_dataset", "eval_dataset", "test_dataset", "test_set"), ("test_data",)),
    **dict.fromkeys(("train_dataset", "training_data", "train_set"), ("train_data",)),
    **dict.fromkeys(("loss_fn", "compute_loss"), ("flax_loss", "torch_loss")),
    **dict.fromkeys(("compute_metrics", "eval_metrics"), ("metrics", "flax_metrics", "torch_metrics")),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs", "num_train_epochs"), ("epochs",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val"), ("clip_grad_norm",)),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), ("accumulation_steps",)),
    **{"batch_size": ("global_batch_size",), "learning_rate": ("lr",), "collate_fn": ("collate",)},
    **{"lr_scheduler": ("schedule", "torch_scheduler"), "callback": ("on_epoch_end",)},
}
# What an object is for that is no value of a flag.
ADVICE = {
    "schedule": "; an Optax schedule goes into flax_optimizer",
    "optimizer": "; an Optax optimizer is called flax_optimizer",
    "dtype": '; 16 bits are amp = "bf16" or "fp16"',
}
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
        own, imported = ({}, {}) if module is None else _unused(module)
        defaults = _defaults(values, own)
        _check_spelling(values, own, imported)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return Program(name, {n: values[n] for n in NAMES if n in values}, defaults, values.get(OPTIONS))


def _defaults(values: Mapping[str, Any], unused: Collection[str] = ()) -> dict[str, Any]:
    """Return the trainers' flags that the names of a file set; `optimizer` may hold several in a `TrainConfig`.

    Args:
        unused: names that the code of the file does not use, which therefore can only be meant as flags.

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
    for name in (f.name for f in dataclasses.fields(TrainerConfig) if f.name in values and f.name not in variables):
        value = plain(values[name])
        is_flag = value is None or type(value) in PLAIN
        if not is_flag and (name not in unused or isinstance(value, TrainerConfig)):
            continue
        if not fits(value, kinds[name]):
            shown = f"{value!r}" if is_flag else getattr(value, "__name__", None) or shortened(f"{value}", 40)
            advice = "" if is_flag else ADVICE.get(name, "")
            must = f"must be {described(kinds[name])}{advice}"
            raise InputError(f"{name} = {shown}: is a flag of the trainers, and {must}")
        given[name] = value
    return given


def _variables(values: Mapping[str, Any]) -> set[str]:
    """Return the names of flags that set no flag in this file, but are variables of its code.

    A port file without data for a trainer has only the flags that a check needs. An optimizer or a step of the file's
    replaces the flags beside it; those that a check refuses there remain.
    """
    flags = {f.name for f in dataclasses.fields(TrainerConfig)}
    variables = {*OF_A_RUN} if values.get("train_data") else flags - {*OF_PORT}
    return variables | (replaced_flags(values).keys() - {*OF_PORT})


def _unused(module: ModuleType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects that a file's code does not use, by name: those that it makes, and those that it imports."""
    nodes = list(ast.walk(ast.parse(Path(module.__file__ or "").read_bytes())))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    made = {node.id for node in nodes if isinstance(node, ast.Name)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    rest = {n: x for n, x in vars(module).items() if n not in used and not isinstance(x, ModuleType) and n[0] != "_"}
    own = {name: value for name, value in rest.items() if name in made}
    return own, {name: value for name, value in rest.items() if name not in made}


def _check_spelling(values: Mapping[str, Any], own: Collection[str], imported: Collection[str]) -> None:
    """Raise if an unused name is almost one that the trainers know, or another word for it, whose default would stay.

    Args:
        own, imported: names that the file does not use. Only one of its own may be misspelt.
    """
    known = {*NAMES, *(f.name for f in dataclasses.fields(TrainerConfig))} - _variables(values)
    absent = [name for name in known if name not in values and len(name) >= MIN_LENGTH]
    for name in (name for name in (*own, *imported) if name not in known):
        near = difflib.get_close_matches(name.lower(), absent, n=1, cutoff=SIMILARITY) if name in own else []
        meant = [n for n in SYNONYMS.get(name, ()) if n in known]
        if near or (meant and not values.keys() & meant):
            raise InputError(f"{name}: not a name of a run file; did you mean {' or '.join(near or meant)}?")
