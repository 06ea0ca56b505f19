"""Command lines: a program, and the flags for it."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.cli.errors import one_line_errors
from jaxddp.cli.flags import parse_plain, value_of
from jaxddp.cli.help import HELP, HELP_ALL
from jaxddp.config import TrainerConfig
from jaxddp.errors import (
    InputError,
)
from jaxddp.program import Program, built_in, check_flags, default_config, load_program
from jaxddp.scripts import file_of_module, refuse_exits
from jaxddp.tracking.kept_program import check_program, check_resumes, resumed_configs
from jaxddp.tracking.run_folder import CONFIG_FILE

Config = TypeVar("Config", bound=TrainerConfig)


def parse(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Parse flags into `config_class`, without a program; see `parse_run`."""
    return parse_run(config_class, argv, prog, default=config_class())


def parse_run(config_class: type[Config], argv: Sequence[str], prog: str, default: Config) -> Config:
    """Parse flags into `config_class`; with --resume DIR, the saved config of that run provides the defaults.

    Args:
        default: values of flags that are left out; with --resume only those that have changed in the program.

    Raises:
        InputError: an unknown flag, a bad value, or a --resume folder without a run.
        SystemExit: with code 0, after --help.
    """
    _check_given_once(argv)
    folder = value_of("--resume", argv)
    if folder is not None:
        if not (Path(folder) / CONFIG_FILE).is_file():
            raise InputError(f"--resume {folder}: not a run folder (it has no {CONFIG_FILE})")
        saved, default = resumed_configs(Path(folder), default)
    config = parse_plain(config_class, argv, prog, default)
    if folder is not None:
        check_resumes(config, saved, default)
    config.check_used(baseline=default)
    return config


def program_of_flags(argv: Sequence[str]) -> tuple[Program, list[str]]:
    """Load the program that the first argument or `-m MODULE` names, or the built-in program; return the rest too.

    Raises:
        InputError: the file cannot be used.
    """
    place = next((number for number, word in enumerate(argv) if word not in (*HELP, HELP_ALL)), len(argv))
    first, *rest = argv[place:] or ["-"]
    if first == "-m" and rest:
        return load_program(file_of_module(rest[0])), [*argv[:place], *rest[1:]]
    if first.startswith("-"):
        return built_in(), list(argv)
    return load_program(first), [*argv[:place], *rest]


def program_and_flags(argv: Sequence[str], trainer: type[Config], prog: str) -> tuple[Program, Config]:
    """Load the program that the first argument names, or the built-in program, and parse the flags for it.

    Args:
        trainer: `TrainerConfig`, or that of torch_ref.

    Raises:
        InputError: the file cannot be used, or a flag has a bad value.
        SystemExit: with code 0, after --help, which may stand before the file.
    """
    start = Path.cwd()
    program, flags = program_of_flags(argv)
    moved = Path.cwd() != start  # by the file, whose functions may read from there; flags are meant from here
    with contextlib.chdir(start):
        if (folder := value_of("--resume", argv)) is not None:
            check_program(Path(folder), program)
        default = default_config(program, trainer)
        config = parse_run(type(default), flags, f"{prog} {program.file_name}" if program.path else prog, default)
    check_flags(program, config)
    names = ("output", "resume", "weights", "weights_partial") if moved else ()
    given = {name: getattr(config, name) for name in names}
    paths: dict[str, Any] = {name: f"{start / path}" for name, path in given.items() if path}
    return program, dataclasses.replace(config, **paths)


def run(
    main: Callable[[Config, Program], Any],
    trainer: type[Config],
    prog: str,
    words: Sequence[str],
    on_refusal: Callable[[Sequence[str], str], None] = lambda argv, reason: None,
) -> None:
    """Load the program, parse the flags and run `main`; `--traceback` shows where an error was raised.

    Args:
        main: what the command does with a config and its program.
        trainer: dataclass of the flags that every program has.
        prog: name of the command in its help.
        words: those of the command line.
        on_refusal: called with the flags and the reason if they are bad input, after it is printed.
    """
    refuse_exits()
    argv = [word for word in words if word != "--traceback"]
    show_traceback = len(argv) < len(words)
    try:
        with one_line_errors(show_traceback):
            program, config = program_and_flags(argv, trainer, prog)
    except SystemExit as stop:
        if stop.__cause__ is not None:  # an error, and not --help
            on_refusal(argv, str(stop.__cause__))
        raise
    try:
        with one_line_errors(show_traceback):
            main(config, program)
    except SystemExit:
        if not show_traceback:  # silence tensorstore's pending reads of a damaged checkpoint
            sys.unraisablehook = lambda _: None
        raise


def _check_given_once(argv: Sequence[str]) -> None:
    """Raise `InputError` if two folders are given; of other flags the last counts, so that scripts may append."""
    for name in ("--output", "--resume"):
        if sum(word == name or word.startswith(name + "=") for word in argv) > 1:
            raise InputError(f"{name}: given twice; must be given once")
