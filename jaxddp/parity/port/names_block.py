"""Write the statement `names = {...}` of a program."""

import ast
import re
from collections.abc import Mapping, Sequence

from jaxddp.parity.port.rules import Rule, quoted, rules_in, source

NAME, NO_TWIN = "names", "no_twin"
HOME = "jaxddp.parity"  # package from which a port imports the rules


def names_block(names: Mapping[str, str | Rule]) -> str:
    """Format the statement with one line per entry.

    Args:
        names: jax prefixes to torch prefixes, rules, or texts of rules.

    >>> print(names_block({"Dense_0": "fc1", "Dense_1": 'flattened("fc2", (8, 4, 4))'}))
    names = {
        "Dense_0": "fc1",
        "Dense_1": flattened("fc2", (8, 4, 4)),
    }
    """
    lines = (f"    {quoted(jax)}: {source(torch)},\n" for jax, torch in names.items())
    return f"{NAME} = {{\n{''.join(lines)}}}"


def import_line(names: Mapping[str, str | Rule]) -> str:
    """Return the import statement that a table's rules need; "" if it has no rules."""
    rules = rules_in(names.values())
    return f"from {HOME} import {', '.join(rules)}" if rules else ""


def no_twin_line(names: Sequence[str]) -> str:
    """Format a statement `no_twin = [...]`, with numbered layers as a loop.

    >>> print(no_twin_line(["mask", "h.0.bias", "h.1.bias"]))
    no_twin = ["mask", *(f"h.{i}.bias" for i in range(2))]
    >>> print(no_twin_line(["h.0.bias", "h.1.bias"]))
    no_twin = [f"h.{i}.bias" for i in range(2)]
    """
    numbered: dict[str, list[int]] = {}
    for name in names:
        template = re.sub(r"(?<![^.])\d+(?![^.])", "{i}", name, count=1)
        numbered.setdefault(template, []).extend(map(int, re.findall(r"(?<![^.])\d+(?![^.])", name)[:1]))
    items: list[str] = []
    for template, numbers in numbered.items():
        if len(numbers) > 1 and sorted(numbers) == [*range(len(numbers))]:
            items.append(f"f{quoted(template)} for i in range({len(numbers)})")
        else:
            items += [quoted(template.replace("{i}", str(number))) for number in numbers] or [quoted(template)]
    if len(items) > 1:
        items = [f"*({item})" if " for i in " in item else item for item in items]
    return f"{NO_TWIN} = [{', '.join(items)}]"


def with_names(text: str, names: Mapping[str, str | Rule], no_twin: Sequence[str] = ()) -> str:
    r"""Put this table into a program's text, in place of the old one or at the end, with the import that it needs.

    If `no_twin` has names, put in that statement, too.

    >>> print(with_names("x = 1\nnames = {}  # none\ny = 2\n", {"a": "b"}))
    x = 1
    names = {
        "a": "b",
    }
    y = 2
    <BLANKLINE>
    """
    imported = _imported(ast.parse(text).body)
    missing = {name: torch for name, torch in names.items() if not set(rules_in([torch])) <= imported}
    if names:
        text = _with_statement(text, NAME, names_block(names))
    if no_twin:
        text = _with_statement(text, NO_TWIN, no_twin_line(no_twin))
    return _with_import(text, import_line(missing))


def _with_statement(text: str, name: str, statement: str) -> str:
    """Put an assignment into the text, in place of the old one or at the end."""
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            lines[node.lineno - 1 : node.end_lineno] = [f"{statement}\n"]
            return "".join(lines)
    return f"{text.rstrip()}\n\n{statement}\n"


def _imported(body: list[ast.stmt]) -> set[str]:
    """Return the names that a file imports from `HOME` without renaming them."""
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == HOME]
    return {alias.name for node in imports for alias in node.names if alias.asname in (None, alias.name)}


def _with_import(text: str, line: str) -> str:
    """Put an import into the text after those at its beginning."""
    if not line:
        return text
    end = 0
    for node in ast.parse(text).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and end == 0
        if not docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        end = node.end_lineno or end
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:end], f"{line}\n", *lines[end:]])
