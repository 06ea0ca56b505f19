"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""Format a table.

    >>> print(table(["x", "y"], [["a|b", 1]]))
    | x | y |
    |---|---|
    | a\|b | 1 |
    """
    lines = [_row(head), "|---" * len(head) + "|", *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
