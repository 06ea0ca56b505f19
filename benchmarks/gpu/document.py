"""A document of titled sections with tables, as Markdown and as HTML; needs neither jax nor torch."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

Cells = Sequence[str]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #333; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: 0.2em 0.9em 0.2em 0; text-align: left }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #e3e3e3; vertical-align: top }
td:not(:first-child) { font-variant-numeric: tabular-nums }
pre { overflow-x: auto; font-size: 12px } img { width: 100% }
"""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    head: Cells
    rows: Sequence[Cells]


@dataclass(frozen=True)
class Section:
    """A part of a document.

    Attributes:
        title: its title.
        text: paragraphs below the title.
        tables: tables below the text.
        printed: a text whose lines and columns stay as they are, at the end; "" for none.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)
    printed: str = ""


def to_markdown(title: str, sections: Sequence[Section], picture: str) -> str:
    """Format a document as Markdown; `picture` is the file of the picture, which follows the first section.

    >>> print(to_markdown("T", [Section("S", ["a"], [Table(["x", "y"], [["1", "a|b"]])])], "p.png"))
    # T
    <BLANKLINE>
    ## S
    <BLANKLINE>
    a
    <BLANKLINE>
    | x | y |
    | --- | --- |
    | 1 | a\\|b |
    <BLANKLINE>
    ![T](p.png)
    <BLANKLINE>
    """
    blocks = [f"# {title}"]
    for number, section in enumerate(sections):
        blocks += [f"## {section.title}", *section.text]
        for table in section.tables:
            rule = ["---"] * len(table.head)
            blocks.append("\n".join(_markdown_row(cells) for cells in (table.head, rule, *table.rows)))
        if section.printed:
            blocks.append(f"```\n{section.printed.rstrip()}\n```")
        if number == 0:
            blocks.append(f"![{title}]({picture})")
    return "\n\n".join(blocks) + "\n"


def to_html(title: str, sections: Sequence[Section], picture: str) -> str:
    """Format a document as a page of HTML that needs no other file, if `picture` is a "data:" address."""
    blocks = [f"<h1>{html.escape(title)}</h1>"]
    for number, section in enumerate(sections):
        blocks.append(f"<h2>{html.escape(section.title)}</h2>")
        blocks += [f"<p>{html.escape(text)}</p>" for text in section.text]
        for table in section.tables:
            head, *rows = (_html_row(cells, kind) for cells, kind in _kinds(table))
            blocks.append("\n".join(["<table>", head, *rows, "</table>"]))
        if section.printed:
            blocks.append(f"<pre>{html.escape(section.printed)}</pre>")
        if number == 0:
            blocks.append(f'<img alt="{html.escape(title)}" src="{picture}">')
    start = f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return "\n".join([start, f"<style>{STYLE}</style>", *blocks, "</html>\n"])


def _markdown_row(cells: Cells) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def _kinds(table: Table) -> list[tuple[Cells, str]]:
    return [(table.head, "th"), *((row, "td") for row in table.rows)]


def _html_row(cells: Cells, kind: str) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"
