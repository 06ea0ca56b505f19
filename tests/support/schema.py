"""A JSON Schema validator for the keywords that the schema of the reports has."""

import json
from typing import Any

from jaxddp.parity.report.json_form import to_json
from jaxddp.parity.report.report import Report

KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}


def check_against(schema: dict[str, Any], report: Report) -> None:
    """Raise unless the report, as JSON, has the form that the schema describes."""
    found = problems(json.loads(to_json(report)), schema, schema["$defs"], "report")
    assert not found, found


def problems(value: Any, schema: dict[str, Any], parts: dict[str, Any], where: str) -> list[str]:
    """Return where a value does not have the form that a schema describes."""
    if "$ref" in schema:
        return problems(value, parts[schema["$ref"].rpartition("/")[2]], parts, where)
    if "anyOf" in schema:
        return [] if any(not problems(value, one, parts, where) for one in schema["anyOf"]) else [f"{where}: {value!r}"]
    if "const" in schema or "enum" in schema:
        return [] if value in schema.get("enum", [schema.get("const")]) else [f"{where}: {value!r}"]
    if schema["type"] == "number":
        return [] if isinstance(value, int | float) and not isinstance(value, bool) else [f"{where}: {value!r}"]
    kind: Any = KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where}: {value!r}"]
    if schema["type"] == "array":
        entries = schema.get("prefixItems") or [schema["items"]] * len(value)
        found = [] if len(entries) == len(value) else [f"{where}: {len(value)} entries"]
        pairs = enumerate(zip(value, entries, strict=False))
        return found + [x for i, (one, of) in pairs for x in problems(one, of, parts, f"{where}[{i}]")]
    if schema["type"] == "object":
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        found = [f"{where}: lacks {name}" for name in schema.get("required", ()) if name not in value]
        found += [f"{where}: has {name}" for name in value if name not in known and more is False]
        of_names = {name: known.get(name, more) for name in value if known.get(name, more)}
        return found + [x for name, of in of_names.items() for x in problems(value[name], of, parts, f"{where}.{name}")]
    return []
