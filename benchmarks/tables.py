"""Tables in Markdown, whose columns are aligned, so that they can be read as they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MISSING = "not measured"
LONGEST = 70  # letters of a cell of `tables`; the mangled names of kernels can have hundreds


def table(head: Sequence[str], rows: Iterable[Iterable[object]], aligned: bool = False) -> str:
    r"""Format a table.

    Args:
        head: titles of the columns.
        rows: cells of each line.
        aligned: make all cells of a column as wide as the widest.

    >>> print(table(["x", "y"], [["a|b", 1]], aligned=True))
    | x    | y |
    |------|---|
    | a\|b | 1 |
    """
    lines = [[_escaped(cell) for cell in line] for line in (head, *rows)]
    if aligned:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    rule = "".join(f"|{'-' * (width + 2)}" for width in widths) if aligned else "|---" * len(head)
    return "\n".join([_line(lines[0]), f"{rule}|", *map(_line, lines[1:])])


def _escaped(cell: object) -> str:
    return str(cell).replace("|", r"\|").replace("\n", " ")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(rows: Mapping[str, Mapping[str, Any]], title: str = "") -> Iterator[str]:
    """Format nested results as Markdown tables: one with a column for each number, then one for each nested table.

    A list is a nested table, and so is a dictionary of dictionaries.

    >>> rows = {"jax": {"rates": {"bf16": 0.12345}, "gaps": [{"ms": 2}]}, "torch": {"rates": {"bf16": 3}}}
    >>> for text in tables(rows):
    ...     print(text)
    |       | rates bf16 |
    |-------|------------|
    | jax   | 0.1235     |
    | torch | 3          |
    | jax, gaps | ms |
    |-----------|----|
    | 1         | 2  |
    """
    flat = {name: dict(_flat(row)) for name, row in rows.items()}
    columns = dict.fromkeys(key for row in flat.values() for key, value in row.items() if not _is_table(value))
    if columns:
        cells = ([name, *(_cell(row.get(key, "")) for key in columns)] for name, row in flat.items())
        yield table([title, *columns], cells, aligned=True)
    for name, row in flat.items():
        for key, value in row.items():
            if _is_table(value):
                items = value.items() if isinstance(value, dict) else enumerate(value, 1)
                lines = {str(item): one if isinstance(one, dict) else {key: one} for item, one in items}
                yield from tables(lines, f"{name}, {key}")


def _is_table(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(one, dict) for one in value.values())
    return isinstance(value, list)


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts and tables of a row, and of the dictionaries in it."""
    for key, value in row.items():
        if isinstance(value, dict) and not _is_table(value):
            yield from ((f"{key} {name}", one) for name, one in _flat(value))
        else:
            yield key, value


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    text = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
