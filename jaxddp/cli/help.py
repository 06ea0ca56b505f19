"""Help of a command in two levels: the flags that most people use, and all flags."""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints
from unittest import mock

import tyro
from tyro.conf import arg

from jaxddp.config.kinds import UNIONS, restored

HELP, HELP_ALL = ("--help", "-h"), "--help-all"
COLUMNS = 80
UNSET = re.compile(r"\s*\bNone: (.*?)\.?$", re.DOTALL)  # end of a flag's text: what happens without a value
FEW = "These are the flags that most people use; --help-all shows all of them."


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether the words of a command line ask for its help.

    >>> asks_for_help(["--lr", "1", "--help-all"]), asks_for_help(["--helper"])
    (True, False)
    """
    return not {*HELP, HELP_ALL}.isdisjoint(argv)


def print_help(
    kind: type, groups: Mapping[str, type], argv: Sequence[str], prog: str, default: Any = None, **options: Any
) -> NoReturn:
    """Print the help of a command, at most 80 columns wide, and exit with code 0.

    Args:
        kind: dataclass of the flags. Its docstring is the description; its `COMMON` names the flags that most people
            use.
        groups: title -> dataclass that declares some of the fields.
        argv: words of the command line; with --help-all, or without `COMMON`, all flags are shown.
        default: values of flags that are left out; None: the defaults of `kind`.
        options: of `tyro.cli`.
    """
    common: Sequence[str] = () if HELP_ALL in argv else getattr(kind, "COMMON", ())
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    options_of_program = getattr(kind, "OPTIONS", None)  # these are all shown
    if common:
        groups = {title: group for title, group in groups.items() if group is options_of_program}
        paragraphs.append(FEW)
    boxes = [(title, view(group, default or kind, _names(kind, group))) for title, group in groups.items()]
    flat = view(kind, default or kind, [name for name in common if name in _names(kind, kind)])
    shown: Any = dataclasses.make_dataclass("Help", boxes, bases=(flat,), kw_only=True)
    output = _Output()
    narrow = {"COLUMNS": str(min(COLUMNS, shutil.get_terminal_size().columns))}
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit), mock.patch.dict(os.environ, narrow):
        tyro.cli(
            tyro.conf.configure(tyro.conf.OmitArgPrefixes)(shown),
            args=["--help"],
            prog=prog,
            description="\n\n".join(paragraphs),
            config=(tyro.conf.FlagCreatePairsOff,),
            **options,
        )
    for line in output.getvalue().splitlines():  # tyro does not wrap the description
        print(line if line[:1] in "╭│╰\x1b" else textwrap.fill(line, COLUMNS))
    sys.exit(0)


class _Output(io.StringIO):
    """A text that is coloured if the terminal is one."""

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def _names(kind: Any, group: Any) -> list[str]:
    """Return the flags of a group that have an effect in this command."""
    left_out = getattr(kind, "LEFT_OUT", ())
    return [f.name for f in dataclasses.fields(group) if f.init and f.name not in left_out]


def view(group: type, default: Any, names: Sequence[str]) -> Any:
    """Return a dataclass of some fields of a group, as tyro is to parse and to show them."""
    texts, kinds = dict(field_texts(group)), get_type_hints(group, include_extras=True)
    fields: list[Any] = []
    for name in names:
        unset = UNSET.search(text := texts.get(name, ""))
        shown = arg(
            help=UNSET.sub("", text),
            metavar=metavar(kinds[name]),
            help_behavior_hint=_hint(getattr(default, name, None), unset[1] if unset else ""),
        )
        value = dataclasses.field()
        if hasattr(default, name):
            value = dataclasses.field(default_factory=partial(restored, getattr(default, name), kinds[name]))
        fields.append((name, Annotated[kinds[name], shown], value))
    made = dataclasses.make_dataclass(group.__name__, fields, kw_only=True)
    described = inspect.cleandoc(group.__doc__ or "")
    made.__doc__ = "" if described.startswith(f"{group.__name__}(") else UNSET.sub("", described)
    return made


def field_texts(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass with the text below each, or the comment after it.

    What the docstring of the class says of "None" holds for each field that does not say it.

    >>> from jaxddp.config import TrainConfig
    >>> dict(field_texts(TrainConfig))["epochs"]
    'Passes over the training set.'
    """
    for declaring in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(declaring))
        except (OSError, TypeError):  # made while the program runs, or built in
            continue
        lines, (tree,) = source.splitlines(), ast.parse(source).body
        of_all = UNSET.search(inspect.cleandoc(declaring.__doc__ or ""))
        for node, following in pairwise([*getattr(tree, "body", ()), None]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
                constant = getattr(following, "value", None) if isinstance(following, ast.Expr) else None
                comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2]
                text = constant.value if isinstance(constant, ast.Constant) else comment
                text = " ".join(str(text).split())
                yield node.target.id, text if UNSET.search(text) or not of_all else f"{text}{of_all[0]}"


def metavar(kind: Any) -> str | None:
    """Return the placeholder of an optional value; None: tyro's.

    >>> metavar(float | None), metavar(tuple[int, ...] | None), metavar(Literal["cpu", "gpu"] | None), metavar(int)
    ('FLOAT', 'INT [INT ...]', '{cpu,gpu}', None)
    """
    parts = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) not in UNIONS or len(parts) == len(get_args(kind)) or len(parts) > 1:
        return None
    kind, items = parts[0], get_args(parts[0])
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, items)) + "}"
    if get_origin(kind) is tuple:
        names = [item.__name__.upper() for item in items if item is not Ellipsis]
        return f"{names[0]} [{names[0]} ...]" if Ellipsis in items else " ".join(names)
    return kind.__name__.upper()


def _hint(value: Any, unset: str) -> str:
    """Return what follows a flag's text: its default as it acts."""
    if value is None or value == ():
        return f"(default: {unset})" if unset else ""
    if isinstance(value, bool):
        return "(default: on)" if value else ""
    return f"(default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"
