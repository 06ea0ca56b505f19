"""Command lines of programs, and errors turned into one line and an exit code."""

import atexit
import contextlib
import dataclasses
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.config import TrainerConfig
from jaxddp.config.ulimits import ulimits
from jaxddp.errors import (
    BAD_INPUT,
    INTERRUPTED,
    InputError,
    TrainingError,
    exit_code,
    not_installed,
    reason,
    tell,
    tells_of_memory,
)
from jaxddp.files import reason_of
from jaxddp.flags import parse_plain, value_of
from jaxddp.program import Program, built_in, check_flags, default_config, load_program
from jaxddp.scripts import file_of_module, refuse_exits
from jaxddp.tracking.kept_program import check_program, check_resumes, resumed_configs
from jaxddp.tracking.run_folder import CONFIG_FILE

Config = TypeVar("Config", bound=TrainerConfig)

# Else the last collection looks through all objects of the frameworks: 0.8 of the 7 s of a small check.
atexit.register(gc.freeze)

HELP = ("--help", "-h")


def parse(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Parse flags into `config_class`, without a run file; see `parse_run`."""
    return parse_run(config_class, argv, prog, default=config_class())


def parse_run(config_class: type[Config], argv: Sequence[str], prog: str, default: Config) -> Config:
    """Parse flags into `config_class`; with --resume DIR, the saved config of that run provides the defaults.

    Args:
        default: values of flags that are left out; with --resume only those that have changed in the run file.

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
    """Load the run file that the first argument or `-m MODULE` names, or the built-in program; return the rest too.

    Raises:
        InputError: the file cannot be used.
    """
    place = next((number for number, word in enumerate(argv) if word not in HELP), len(argv))
    first, *rest = argv[place:] or ["-"]
    if first == "-m" and rest:
        return load_program(file_of_module(rest[0])), [*argv[:place], *rest[1:]]
    if first.startswith("-"):
        return built_in(), list(argv)
    return load_program(first), [*argv[:place], *rest]


def program_and_flags(argv: Sequence[str], trainer: type[Config], prog: str) -> tuple[Program, Config]:
    """Load the run file that the first argument names, or the built-in program, and parse the flags for it.

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


@contextlib.contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """Print errors that a user can act on as one line on stderr, and exit with code 2; open closed streams first."""
    open_streams()
    try:
        yield
    except (InputError, TrainingError) as error:
        if show_traceback:
            traceback.print_exc()
        for line in (f"error: {error}", *(f"  {frame}" for frame in getattr(error, "frames", ()))):
            tell(line)
        raise SystemExit(exit_code(error)) from error
    except ModuleNotFoundError as error:
        if show_traceback or not not_installed(error):
            raise
        tell(f"error: {not_installed(error)}")
        raise SystemExit(BAD_INPUT) from error
    except (MemoryError, RuntimeError) as error:
        if show_traceback or not tells_of_memory(error):
            raise
        limits = "".join(f"; {name} is {limit // 1024}" for name, limit in ulimits().items())
        tell(f"error: not enough memory: {reason(error)}; choose smaller sizes{limits}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as shells say it
    except OSError as error:
        if show_traceback or error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        tell(f"error: {where}{reason_of(error)}")
        raise SystemExit(BAD_INPUT) from error
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def variables_named(prefix: str) -> Iterator[None]:
    """Turn a `ValueError` of an import into an `InputError` that names the environment variables it may come from.

    Args:
        prefix: start of the variables' names. Those whose value the error cites are named, or else all.
    """
    try:
        yield
    except ValueError as error:
        given = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        cited = {name: value for name, value in given.items() if value and value in str(error)}
        variables = ", ".join(f"{name}={value}" for name, value in (cited or given).items())
        raise InputError(f"{variables}: {reason(error)}") from error


def open_streams() -> None:
    """Make stdin, stdout and stderr usable: a closed one becomes the null device, and any text can be printed.

    Otherwise the next file that opens gets the number of the closed stream, and all that is printed there.
    A character that the encoding of a stream lacks is printed as "?".
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(
    main: Callable[[Config, Program], Any],
    trainer: type[Config],
    prog: str,
    on_refusal: Callable[[Sequence[str], str], None] = lambda argv, reason: None,
) -> None:
    """Load the program, parse sys.argv and run `main`; `--traceback` shows where an error was raised.

    Args:
        main: what the command does with a config and its program.
        trainer: dataclass of the flags that every program has.
        prog: name of the command in its help.
        on_refusal: called with the flags and the reason if they are bad input, after it is printed.
    """
    refuse_exits()
    argv = [word for word in sys.argv[1:] if word != "--traceback"]
    show_traceback = len(argv) < len(sys.argv) - 1
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
