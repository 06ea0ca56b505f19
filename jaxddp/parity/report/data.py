"""A report as JSON and back, to the last bit."""

import dataclasses
import json
import math
import numbers
import types
import typing
from typing import Any

from jaxddp.errors import InputError
from jaxddp.parity.report.report import Report

FORMAT = "jaxddp.parity report 1"
NOT_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has none of them


def to_json(report: Report) -> str:
    """A report as JSON: its fields by name, tuples as lists, NaN and infinity as "nan", "inf", "-inf".

    >>> json.loads(to_json(Report("port.py", 2, 10, "float64")))["world_size"]
    2
    """
    return json.dumps({"format": FORMAT, **_encode(report)}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report of `to_json`.

    Raises:
        InputError: the text is no report, or one of another version.

    >>> from_json(to_json(Report("port.py", 2, 10, "float64"))).verdict
    'incomplete'
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"report: is not JSON: {error}") from None
    form = found.pop("format", None) if isinstance(found, dict) else None
    if form != FORMAT:
        raise InputError(f"report: its format is {form!r}, and should be {FORMAT!r}")
    return _decode(Report, found, "report")


def _encode(value: Any) -> Any:
    """Dataclasses, tuples and floats as JSON has them."""
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else f"{value:g}"
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """What a field of type `kind` was encoded from.

    Args:
        where: the field's path, for the message.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        kept = next(option for option in of if option is not types.NoneType)
        return None if value is None else _decode(kept, value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _expect(dict, value, where), where)
    if origin is dict:
        items = _expect(dict, value, where).items()
        return {key: _decode(of[1], item, f"{where}.{key}") for key, item in items}
    if origin is tuple:
        items = _expect(list, value, where)
        kinds = of[:1] * len(items) if of[-1] is Ellipsis else of
        if len(kinds) != len(items):
            raise InputError(f"{where}: has {len(items)} entries, and should have {len(kinds)}")
        return tuple(_decode(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, items, strict=True)))
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and isinstance(value, str) and value in NOT_NUMBERS:
        return NOT_NUMBERS[value]
    return _expect(kind, value, where)


def _decode_fields(kind: Any, found: dict[str, Any], where: str) -> Any:
    types_of = typing.get_type_hints(kind)
    if found.keys() != types_of.keys():
        raise InputError(f"{where}: its fields should be {', '.join(types_of)}, and are {', '.join(found)}")
    return kind(**{name: _decode(types_of[name], value, f"{where}.{name}") for name, value in found.items()})


def _expect(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise InputError(f"{where}: is {value!r:.80}, and should be of type {kind.__name__}")
    return value
