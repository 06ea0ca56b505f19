"""Flags parsed into any dataclass by tyro, whose errors become one line."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
from collections.abc import Sequence
from functools import partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxddp.config.checks import flag
from jaxddp.config.kinds import restored
from jaxddp.errors import InputError

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
    kinds: Any = config_class
    switches = [flag(f"no_{f.name}") for f in dataclasses.fields(kinds) if f.type == bool | str]
    argv = [part for word in argv for part in ([f"--{word[5:]}", "False"] if word in switches else [word])]
    if default is None or not (groups := _groups(config_class)):
        return _parsed(config_class, config_class, argv, prog, **({} if default is None else {"default": default}))
    boxes = _parsed(_boxes(config_class, groups, default), config_class, argv, prog)
    return config_class(
        **{f.name: getattr(box, f.name) for box in vars(boxes).values() for f in dataclasses.fields(box) if f.init}
    )


def parse_known(config_class: type[Options], argv: Sequence[str], prog: str) -> tuple[Options, list[str]]:
    """Parse the flags of `config_class`; return the other words too, such as the flags of a run file.

    Raises:
        InputError, SystemExit: as `parse_plain`, but for unknown flags.

    >>> parse_known(dataclasses.make_dataclass("Options", [("steps", int, 10)]), ["--lr", "1", "--steps", "3"], "prog")
    (Options(steps=3), ['--lr', '1'])
    """
    return _parsed(config_class, config_class, argv, prog, return_unknown_args=True)


def _parsed(kind: Any, config_class: type, argv: Sequence[str], prog: str, **options: Any) -> Any:
    """Call tyro on `kind`, which has the flags of `config_class`; turn its errors into one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(kind, args=list(argv), prog=prog, registry=REGISTRY, **options)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(_explain(output.getvalue(), config_class)) from None


def _groups(config_class: type) -> list[type]:
    """Return the base dataclasses that declare the fields of `config_class`, one per group of the help."""
    bases = [kind for kind in reversed(config_class.__mro__[1:]) if dataclasses.is_dataclass(kind)]
    options = getattr(config_class, "OPTIONS", None)  # those of a run file
    if options is not None:  # without what it computes of them, which would be given as a flag
        options = type(options.__name__, (options,), {"__doc__": options.__doc__, "__post_init__": lambda *_: None})
    fields = {field.name for field in dataclasses.fields(config_class)}
    declaring = [kind for kind in bases if fields & inspect.get_annotations(kind).keys()]
    return [*([] if options is None else [options]), *declaring]


def _boxes(config_class: type, groups: Sequence[type], default: Any) -> Any:
    """Return a dataclass with one field per group, which tyro shows as one box each in the help."""

    def box(group: type) -> tuple[str, type, Any]:
        kinds = get_type_hints(group)
        values = {
            f.name: restored(getattr(default, f.name), kinds[f.name]) for f in dataclasses.fields(group) if f.init
        }
        return _title(config_class, group), group, dataclasses.field(default_factory=partial(group, **values))

    boxes: Any = dataclasses.make_dataclass(config_class.__name__, map(box, groups))
    boxes.__doc__ = config_class.__doc__
    return tyro.conf.configure(tyro.conf.OmitArgPrefixes)(boxes)


def _title(config_class: type, group: type) -> str:
    """Return the title of a group in the help: that of a run file's options is the file's name."""
    program = getattr(config_class, "PROGRAM", None)
    if program is not None and program.options is not None and issubclass(group, program.options):
        return program.stem
    return group.__name__.lower()


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
