"""Reports as JSON and back, without losing a bit."""

import dataclasses
import json
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any

from jaxddp.errors import InputError, reason, shortened
from jaxddp.parity.coverage import Beyond
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.findings import Cause, NextBest
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import SENTENCES, alternatives, line, sentence, sentences

FORMAT = "jaxddp.parity report 9"
MARK = rb'\[?\{\s*"format": "jaxddp\.parity report '  # of a report, or of a list of them
# What a reader finds beside the fields of a class: name -> how it is made, and its description.
DERIVED: dict[type, dict[str, tuple[Callable[[Any], str | tuple[str, ...]], str]]] = {
    Deviation: {"says": (sentence, "What the port does, with the values, in a line.")},
    NextBest: {"says": (line, "What the deviations are, in a line.")},
    Beyond: {"says": (alternatives, 'What one side does, and the other does not, in a line; "": unknown.')},
    Cause: {
        "names": (lambda cause: cause.names, "Names in the catalogue, one for each deviation."),
        "says": (sentences, "One line for each deviation."),
        "fixes": (lambda cause: cause.fixes, "What the port should do instead, one line for each deviation."),
    },
}
NOT_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no form for these


def to_json(report: Report) -> str:
    """Encode a report as JSON: fields by name, tuples as lists, NaN and infinity as "nan", "inf", "-inf".

    >>> json.loads(to_json(Report("port.py", 2, 10, "float64")))["world_size"]
    2
    """
    return json.dumps({"format": FORMAT, **_encode(report)}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """Decode a report that `to_json` encoded.

    Raises:
        InputError: the text is not a report, or the report is of another version.

    >>> from_json(to_json(Report("port.py", 2, 10, "float64"))).verdict
    'incomplete'
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"report: not JSON: {reason(error)}") from None
    form = fields.pop("format", None) if isinstance(fields, dict) else None
    if form != FORMAT:
        raise InputError(f"report: format is {form!r}; must be {FORMAT!r}")
    return _decode(Report, fields, "report")


def _encode(value: Any) -> Any:
    """Convert dataclasses, tuples and floats to values that JSON has."""
    if isinstance(value, Statement):
        return {"form": value.form, "parts": _encode(dict(value.parts))}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        derived = {name: made(value) for name, (made, _) in DERIVED.get(type(value), {}).items()}
        return {name: _encode(item) for name, item in (fields | derived).items()}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else f"{value:g}"
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Convert a value of JSON to a field of type `kind`.

    Args:
        kind: type annotation of the field.
        value: decoded JSON.
        where: path of the field, for the message.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        kept = next(option for option in of if option is not types.NoneType)
        return None if value is None else _decode(kept, value, where)
    if kind is Statement:
        return _statement(_expect(dict, value, where), where)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _expect(dict, value, where), where)
    if origin is dict:
        items = _expect(dict, value, where).items()
        return {key: _decode(of[1], item, f"{where}.{key}") for key, item in items}
    if origin is tuple:
        items = _expect(list, value, where)
        kinds = of[:1] * len(items) if of[-1] is Ellipsis else of
        if len(kinds) != len(items):
            raise InputError(f"{where}: has {len(items)} entries; must have {len(kinds)}")
        return tuple(_decode(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, items, strict=True)))
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, str) and value in NOT_NUMBERS:
        return NOT_NUMBERS[value]
    return _expect(kind, value, where)


def _decode_fields(kind: Any, fields: dict[str, Any], where: str) -> Any:
    types_of, derived = typing.get_type_hints(kind), DERIVED.get(kind, ())
    if fields.keys() != types_of.keys() | {*derived}:
        raise InputError(f"{where}: fields are {', '.join(fields)}; must be {', '.join((*types_of, *derived))}")
    fields = {name: value for name, value in fields.items() if name not in derived}
    return kind(**{name: _decode(types_of[name], value, f"{where}.{name}") for name, value in fields.items()})


def _statement(fields: dict[str, Any], where: str) -> Statement:
    if fields.keys() != {"form", "parts"} or fields["form"] not in SENTENCES:
        raise InputError(f"{where}: is {shortened(repr(fields))}; must be a form that has a sentence, and its parts")
    parts = _expect(dict, fields["parts"], f"{where}.parts")
    return Statement(fields["form"], **{name: _part(part, where) for name, part in parts.items()})


def _part(part: Any, where: str) -> Any:
    """Convert JSON to a part of a statement."""
    if isinstance(part, list):
        return tuple(_part(one, where) for one in part)
    if isinstance(part, dict):
        return _statement(part, where)
    return NOT_NUMBERS.get(part, part) if isinstance(part, str) else part


def _expect(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise InputError(f"{where}: is {shortened(repr(value))}; must be of type {kind.__name__}")
    return value
