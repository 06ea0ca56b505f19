"""Print a report on a terminal in colours: its verdict, causes, and edited lines; the text is the same without them."""

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.text import Text
from rich.theme import Theme

STYLES = {
    **{"equal": "bold green", "beyond": "bold yellow", "different": "bold red", "incomplete": "bold magenta"},
    **{"problem": "bold magenta", "cause": "bold", "label": "cyan", "place": "underline"},
    **{"added": "green", "removed": "red", "heading": "dim"},
}


class ReportHighlighter(RegexHighlighter):
    """Styles of the words of a report; a style has the name of its group."""

    base_style = "report."
    highlights = (
        r"^(?P<equal>equal)(?=:)",
        r"^(?P<beyond>beyond|remark|without effect in this run)(?=[ :])",
        r"^(?P<different>different(?: in rounding)?)(?=:)",
        r"^(?P<incomplete>incomplete)(?=:)",
        r"^(?P<problem>problem)(?=:)",
        r"^[a-z].{42}(?P<different>different|differs(?: too)?)\b",  # in the column of verdicts
        r"^[a-z].{42}(?P<equal>equal)\b",
        r"^(?P<heading>stage  .*)$",
        r"^  (?P<label>cause|either|or|and|fix|lines|parts|proof|layer|patch)  ",
        r"^  (?:cause|either|or|and) +(?P<cause>.*)  \[",
        r"(?P<place>[\w./-]+\.py:\d+)",
        r"^ {9}(?P<added>\+ .*)$",
        r"^ {9}(?P<removed>- .*)$",
    )


def highlighted(text: str) -> Text:
    """Return a report's text with styles.

    >>> [str(span.style) for span in highlighted("equal: Nothing differs").spans]
    ['report.equal']
    """
    lines = [ReportHighlighter()(line) for line in text.splitlines()]
    return Text("\n").join(lines)


def show(text: str) -> None:
    """Print a report; without colours if stdout is no terminal, or if NO_COLOR is set."""
    theme = Theme({f"report.{name}": style for name, style in STYLES.items()})
    console = Console(theme=theme, soft_wrap=True, highlight=False)
    if console.is_terminal and console.color_system:
        console.print(highlighted(text))
    else:
        print(text)
