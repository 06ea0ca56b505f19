"""JSON Schema of the reports that `to_json` writes, made from the classes of the findings.

python -m jaxddp.parity.report.json_schema > docs/parity.schema.json
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Any

from jaxddp.parity.deviation import Statement
from jaxddp.parity.findings import Cause, Findings
from jaxddp.parity.report.json_form import DERIVED, FORMAT, NOT_NUMBERS

PLAIN = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": [*NOT_NUMBERS]}]}


def schema() -> dict[str, Any]:
    """Return the schema of a report.

    >>> schema()["properties"]["format"]
    {'const': 'jaxddp.parity report 9'}
    """
    parts: dict[str, Any] = {}
    report = _of_class(Findings, parts)
    report["properties"] = {"format": {"const": FORMAT}} | report["properties"]
    report["required"] = ["format", *report["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FORMAT, **report, "$defs": parts}


def _of_class(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a class, and put those of the classes of its fields into `parts`."""
    hints, about = typing.get_type_hints(kind), _described(kind)
    hints |= {"parts": dict[str, Any]} if kind is Statement else {}
    properties = {
        field.name: _of_type(hints[field.name], parts)
        | ({"description": about[field.name]} if field.name in about else {})
        for field in dataclasses.fields(kind)
    }
    for name, (_, description) in DERIVED.get(kind, {}).items():
        made = _of_type(tuple[str, ...] if kind is Cause else str, parts)
        properties[name] = made | {"description": description}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _of_type(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field's type."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return {"anyOf": [_of_type(one, parts) for one in of if one is not types.NoneType] + [{"type": "null"}]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(of[1], parts)}
    if origin is tuple and of[-1] is Ellipsis:
        return {"type": "array", "items": _of_type(of[0], parts)}
    if origin is tuple:
        entries = [_of_type(one, parts) for one in of]
        return {"type": "array", "prefixItems": entries, "minItems": len(of), "maxItems": len(of)}
    if kind is Any:  # a part of a statement: a text, a number, a statement, or an array of these
        return {}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}  # so that its own fields may refer to it
            parts[kind.__name__] |= _of_class(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return dict(NUMBER) if kind is float else dict(PLAIN[kind])


def _described(kind: type) -> dict[str, str]:
    """Return what a class's docstring says of its attributes, those that a line describes together too."""
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    ([a-z][\w, ]*): ((?:.+\n?)(?:^ {8}.+\n?)*)", listed, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
