"""Flags parsed into any dataclass by tyro, whose errors become one line."""

import dataclasses
import difflib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro
from tyro._errors import (  # private, but structured; else the reason would be read out of a drawn box
    InvalidChoice,
    MissingArgs,
    ParseErrorEvent,
    UnrecognizedArgs,
    on_parse_error,
)
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxddp.cli.help import asks_for_help, metavar, print_help, view
from jaxddp.config.checks import flag
from jaxddp.config.hints import OTHER_TRAINERS, VALUES
from jaxddp.config.kinds import choices_of
from jaxddp.errors import InputError, name_error

Options = TypeVar("Options")  # a dataclass
REGISTRY = ConstructorRegistry()


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
    return config_class(**_parsed(config_class, argv, prog, default))


def parse_known(config_class: type[Options], argv: Sequence[str], prog: str) -> tuple[Options, list[str]]:
    """Parse the flags of `config_class`; return the other words too, such as the flags of a program.

    Raises:
        InputError, SystemExit: as `parse_plain`, but for unknown flags.

    >>> parse_known(dataclasses.make_dataclass("Options", [("steps", int, 10)]), ["--lr", "1", "--steps", "3"], "prog")
    (Options(steps=3), ['--lr', '1'])
    """
    unknown: list[str] = []
    options = config_class(**_parsed(config_class, argv, prog, unknown=unknown))
    return options, unknown


def _parsed(
    config_class: Any, argv: Sequence[str], prog: str, default: Any = None, unknown: list[str] | None = None
) -> dict[str, Any]:
    """Return the values of the fields; tyro's errors become one line.

    Args:
        unknown: gets the words that are no flags of `config_class`; None: they are errors.
    """
    if asks_for_help(argv):
        print_help(config_class, _groups(config_class), argv, prog, default, registry=REGISTRY)
    fields = [f.name for f in dataclasses.fields(config_class) if f.init]
    switches = [flag(f"no_{f.name}") for f in dataclasses.fields(config_class) if f.type == bool | str]
    argv = [part for word in argv for part in ([f"--{word[5:]}", "False"] if word in switches else [word])]

    def refuse(event: ParseErrorEvent) -> None:
        raise InputError(_reason(event, argv, config_class))

    kind = view(config_class, default or config_class, fields)
    with on_parse_error(refuse):
        if unknown is None:
            parsed = tyro.cli(kind, args=argv, prog=prog, registry=REGISTRY)
        else:
            parsed, others = tyro.cli(kind, args=argv, prog=prog, registry=REGISTRY, return_unknown_args=True)
            unknown += others
    return {name: getattr(parsed, name) for name in fields}


def _groups(config_class: Any) -> dict[str, type]:
    """Return the dataclasses that declare the fields of `config_class` by their titles, one per group of the help."""
    bases: list[Any] = [kind for kind in reversed(config_class.__mro__[1:]) if dataclasses.is_dataclass(kind)]
    fields = {field.name for field in dataclasses.fields(config_class)}
    groups = {kind.__name__.lower(): kind for kind in bases if fields & inspect.get_annotations(kind).keys()}
    if (options := getattr(config_class, "OPTIONS", None)) is not None:
        groups = {config_class.PROGRAM.stem: options, **groups}
    return groups or {"options": config_class}


def value_of(name: str, argv: Sequence[str]) -> str | None:
    """Return the value of a flag, or None if the flag is absent."""
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word == name:
            return following
        if word.startswith(name + "="):
            return word.removeprefix(name + "=")
    return None


@REGISTRY.primitive_rule
def _switch_or_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Show `bool | str` as a switch that may have a value: `--shuffle`, `--shuffle index`; False is `--no-shuffle`."""
    if info.type != bool | str:
        return None
    known = {"True": True, "False": False}
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME]",
        instance_from_str=lambda words: known.get(" ".join(words), " ".join(words) or True),
        is_instance=lambda value: isinstance(value, bool | str),
        str_from_instance=lambda value: [str(value)],
    )


def _reason(event: ParseErrorEvent, argv: Sequence[str], config_class: type) -> str:
    """Return in a line why tyro refuses a command line."""
    if isinstance(event, MissingArgs):
        return f"{', '.join(_name(missing.arg) for missing in event.missing_arguments)}: missing; see --help"
    if isinstance(event, UnrecognizedArgs):
        return _unknown(event.tokens[0].partition("=")[0], config_class)
    argument: Any = getattr(event, "argument", None)
    if argument is None:
        return " ".join(f"{getattr(event, 'message', type(event).__name__)}".split())
    name, kind = _name(argument), argument.field.type
    if isinstance(event, InvalidChoice):
        known = [f"{choice}" for choice in choices_of(kind)]
        return name_error(name, event.value, known, VALUES.get(argument.field.intern_name, {}))
    given, expected = " ".join(_words_after(name, argv)), metavar(kind) or argument.lowered.metavar
    return f"{name} {given}: expected {expected}" if given else f"{name}: needs a value, {expected}"


def _name(argument: Any) -> str:
    """Return the name of a flag, or the placeholder of a positional argument."""
    return argument.lowered.metavar if argument.is_positional() else argument.lowered.name_or_flags[-1]


def _unknown(word: str, config_class: type) -> str:
    """Return the error about a word that is no flag, with the flag that may be meant."""
    if not word.startswith("-"):
        return f"{word}: unexpected argument; see --help"
    word, given = word.replace("_", "-"), word  # Hugging Face's flags have underscores
    fields = {f.name for f in dataclasses.fields(config_class)}
    if (meant := OTHER_TRAINERS.get(word)) is not None and meant.split()[0][2:].replace("-", "_") in fields:
        return f"{given}: unknown flag; it is {meant} here"
    # A field that is spelt right and unknown is a positional argument.
    near = difflib.get_close_matches(word, {flag(name) for name in fields} - {given}, n=1)
    return f"{given}: unknown flag" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _words_after(name: str, argv: Sequence[str]) -> Iterator[str]:
    """Yield the words that a flag was given, in its last use."""
    place = max(number for number, word in enumerate(argv) if word.partition("=")[0] == name)
    if "=" in argv[place]:
        yield argv[place].partition("=")[2]
        return
    yield from itertools.takewhile(lambda word: not word.startswith("--"), argv[place + 1 :])
