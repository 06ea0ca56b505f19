"""Command lines parsed into dataclasses, and errors turned into one line and an exit code."""

import atexit
import contextlib
import dataclasses
import difflib
import gc
import inspect
import io
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxddp.config import TrainConfig
from jaxddp.config.checks import flag
from jaxddp.config.ulimits import ulimits
from jaxddp.errors import BAD_INPUT, INTERRUPTED, InputError, TrainingError, exit_code, tells_of_memory
from jaxddp.tracking.run_folder import CONFIG_FILE, load_config

Config = TypeVar("Config", bound=TrainConfig)
Options = TypeVar("Options")  # a dataclass

# Else the last collection looks through all objects of the frameworks: 0.8 of the 7 s of a small check.
atexit.register(gc.freeze)

REGISTRY = ConstructorRegistry()


def parse(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Parse flags into `config_class`; with --resume DIR, the saved config of that run provides the defaults.

    Raises:
        InputError: an unknown flag, a bad value, or a --resume folder without a run.
        SystemExit: with code 0, after --help.
    """
    _check_given_once(argv)
    default: Config = config_class()
    folder = value_of("--resume", argv)
    if folder is not None:
        if not (Path(folder) / CONFIG_FILE).is_file():
            raise InputError(f"--resume {folder}: not a run folder (it has no {CONFIG_FILE})")
        try:
            default = load_config(Path(folder), config_class)
        except RecursionError:
            raise InputError(f"{folder}/{CONFIG_FILE}: not a run's config (nested too deeply)") from None
    config = parse_plain(config_class, argv, prog, default)
    if folder is not None:
        config.check_resumes(default)
    config.check_used(baseline=default)
    return config


def parse_plain(config_class: type[Options], argv: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Parse flags, and positional arguments for fields typed `tyro.conf.Positional`, into any dataclass.

    Args:
        config_class: dataclass with the fields; its docstring is the help.
        default: values of fields without a flag; None: the defaults of the class, fields without one are required.

    Raises:
        InputError: an unknown flag, a bad value, or a missing argument.
        SystemExit: with code 0, after --help.

    >>> parse_plain(dataclasses.make_dataclass("Options", [("steps", int, 10)]), ["--steps", "3"], "prog").steps
    3
    """
    output = io.StringIO()
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    groups = [] if default is None else _groups(config_class)
    try:
        with contextlib.redirect_stderr(output):
            if not groups:
                return tyro.cli(config_class, args=list(argv), prog=prog, registry=REGISTRY, **defaults)
            boxes = tyro.cli(_boxes(config_class, groups, default), args=list(argv), prog=prog, registry=REGISTRY)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(_explain(output.getvalue(), config_class)) from None
    return config_class(**{name: value for box in vars(boxes).values() for name, value in vars(box).items()})


def _groups(config_class: type) -> list[type]:
    """Return the base dataclasses that declare the fields of `config_class`, one per group of the help."""
    bases = [kind for kind in reversed(config_class.__mro__[1:]) if dataclasses.is_dataclass(kind)]
    return [kind for kind in bases if inspect.get_annotations(kind)]


def _boxes(config_class: type, groups: Sequence[type], default: Any) -> Any:
    """Return a dataclass with one field per group, which tyro shows as one box each in the help."""

    def box(group: type) -> tuple[str, type, Any]:
        values = {field.name: getattr(default, field.name) for field in dataclasses.fields(group)}
        return group.__name__.lower(), group, dataclasses.field(default=group(**values))

    boxes: Any = dataclasses.make_dataclass(config_class.__name__, map(box, groups))
    boxes.__doc__ = config_class.__doc__
    return tyro.conf.configure(tyro.conf.OmitArgPrefixes)(boxes)


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Show `float | None` as FLOAT in the help; the word None still gives None."""
    kinds = set(get_args(info.type)) - {NoneType}
    if not {NoneType} < set(get_args(info.type)) or len(kinds) != 1 or not kinds <= {int, float, str}:
        return None
    kind = kinds.pop()
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: None if words == ["None"] else kind(*words),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


@contextlib.contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """Print errors that a user can act on as one line on stderr, and exit with code 2; open closed streams first."""
    open_streams()
    try:
        yield
    except (InputError, TrainingError) as error:
        if show_traceback:
            traceback.print_exc()
        _tell(f"error: {on_one_line(str(error))}")
        raise SystemExit(exit_code(error)) from error
    except (MemoryError, RuntimeError) as error:
        if show_traceback or not tells_of_memory(error):
            raise
        limits = "".join(f"; {name} is {limit // 1024}" for name, limit in ulimits().items())
        _tell(f"error: not enough memory: {_first_line(error)}; choose smaller sizes{limits}")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as shells say it
    except OSError as error:
        if show_traceback or error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _tell(f"error: {where}{error.strerror.lower()}")
        raise SystemExit(BAD_INPUT) from error
    except KeyboardInterrupt:
        _tell("interrupted")
        sys.exit(INTERRUPTED)


def _tell(line: str) -> None:
    """Print on stderr, unless it is closed."""
    with contextlib.suppress(OSError):
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write, which a launcher does not mix


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
        raise InputError(f"{variables}: {_first_line(error)}") from error


def on_one_line(message: str) -> str:
    """Escape line breaks and other characters that are not printable, as a flag's value may hold them.

    >>> print(on_one_line("--model a\\nb: unknown"))
    --model a\\nb: unknown
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in message)


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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def run(
    main: Callable[[Config], None],
    config_class: type[Config],
    prog: str,
    tell: Callable[[Sequence[str], str], None] = lambda argv, reason: None,
) -> None:
    """Parse sys.argv and run `main`; `--traceback` shows where an error was raised.

    Args:
        main: what the command does with its config.
        config_class: dataclass of the flags.
        prog: name of the command in its help.
        tell: called with the flags and the reason if they are bad input, after it is printed.
    """
    argv = [word for word in sys.argv[1:] if word != "--traceback"]
    show_traceback = len(argv) < len(sys.argv) - 1
    try:
        with one_line_errors(show_traceback):
            config = parse(config_class, argv, prog)
    except SystemExit as stop:
        if stop.__cause__ is not None:  # an error, and not --help
            tell(argv, str(stop.__cause__))
        raise
    try:
        with one_line_errors(show_traceback):
            main(config)
    except SystemExit:
        if not show_traceback:  # silence tensorstore's pending reads of a damaged checkpoint
            sys.unraisablehook = lambda _: None
        raise


def _check_given_once(argv: Sequence[str]) -> None:
    """Raise `InputError` if two folders are given; of other flags the last counts, so that scripts may append."""
    for name in ("--output", "--resume"):
        if sum(word == name or word.startswith(name + "=") for word in argv) > 1:
            raise InputError(f"{name}: given twice; must be given once")


def value_of(name: str, argv: Sequence[str]) -> str | None:
    """Return the value of a flag, or None if the flag is absent."""
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == name:
            return following
        if word.startswith(name + "="):
            return word.removeprefix(name + "=")
    return None


def _explain(boxed: str, config_class: type) -> str:
    """Condense tyro's error message, a box of several lines, to one line."""
    message = _unboxed(boxed)
    if match := re.match(r"Missing from .*?: (.*)", message):
        names = [argument.split()[0] for argument in match[1].split("(required)") if argument.strip()]
        return f"{', '.join(names)}: missing; see --help"
    if match := re.match(r"Unrecognized options: ([^- ]\S*)", message):
        return f"{match[1]}: unexpected argument; see --help"
    if match := re.match(r"Unrecognized options: (-[^ ,=]+)", message):
        # A field that is spelt right and unknown is a positional argument.
        known = {flag(field.name) for field in dataclasses.fields(config_class)} - {match[1]}
        near = difflib.get_close_matches(match[1], known, n=1)
        return f"{match[1]}: unknown flag" + (f"; did you mean {near[0]}?" if near else "; see --help")
    if match := re.match(r"Error parsing (--\S+): no type matching (.+) could be instantiated from \[(.*?)\]", message):
        value = " ".join(word.strip("', ") for word in match[3].split(","))
        kind = re.sub(r"^{\[?(.*?)\]?}$", r"\1", match[2].replace("{None}|", ""))
        return f"{match[1]} {value}: expected {kind}"
    if match := re.match(r"Error parsing (--\S+): invalid literal for int\(\) with base 10: '(.*)'", message):
        return f"{match[1]} {match[2]}: expected INT"
    if match := re.match(r"Error parsing (--\S+): could not convert string to float: '(.*)'", message):
        return f"{match[1]} {match[2]}: expected FLOAT"
    return re.sub(r"^Error parsing \w+: ", "", message)


def _unboxed(boxed: str) -> str:
    """Return the text between the title and the first rule of a box, on one line."""
    titled = False
    lines: list[str] = []
    for line in boxed.splitlines():
        text = line.strip("│╭╮╰╯ ")
        is_rule = bool(text) and set(text) <= set("─-")  # "-" where the terminal has no other
        if is_rule and titled:
            break
        if is_rule or line.startswith("╭"):
            lines, titled = [], True
        elif text:
            lines.append(text)
    return " ".join(lines)
