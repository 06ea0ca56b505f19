"""HTML and SVG elements; all text that is not markup already is escaped."""

import html
import re
from collections.abc import Iterable

# Control characters and lone surrogates, which HTML does not allow, even escaped; and those that reorder the text.
UNFIT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
NAME = r"[A-Za-z_]\w*"
BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
VALUE = rf"(?:{BRACKETS}|\"\w+\"|[\w.\"']*\w)"
CALL = rf"{NAME}(?:\.\w+)*{BRACKETS}(?:\.\w+{BRACKETS}|\[[^\]]*\])*"
# Code in a line of English: a call, its assignment, name=value, an index, or a dotted or underscored name.
CODE = re.compile(
    rf"(?:{NAME} = )?{CALL}|{NAME}(?:\.\w+)*(?:=(?:{VALUE})?|\[[^\]]*\])|{NAME}(?:\.\w+)+|[A-Za-z]\w*_\w+",
    re.ASCII,
)


class Html(str):
    """Text that is markup and must not be escaped."""

    __slots__ = ()


Content = str | Iterable[str]
Attribute = str | float | None


def tag(name: str, *content: Content, **attributes: Attribute) -> Html:
    """Return an element.

    Args:
        name: name of the element.
        content: strings, or iterables of strings; all but `Html` are escaped.
        attributes: `class_` and `aria_label` are written class and aria-label; None leaves an attribute out.

    >>> tag("td", "<script>", tag("b", 1e-3.hex()[:2]), class_="worst", hidden=None)
    '<td class="worst">&lt;script&gt;<b>0x</b></td>'
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Concatenate strings, escaping all but `Html`.

    >>> join("a < b", [tag("i", "c")])
    'a &lt; b<i>c</i>'
    """
    return Html("".join(escape(piece) if isinstance(piece, str) else join(*piece) for piece in content))


def escape(text: str) -> Html:
    """Escape text.

    >>> escape("a & b"), escape(escape("a & b"))
    ('a &amp; b', 'a &amp; b')
    """
    return text if isinstance(text, Html) else Html(html.escape(UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)))


def breakable(text: str) -> Html:
    """Escape a tensor's name, and allow line breaks after its dots and slashes.

    >>> breakable("fc.weight")
    'fc.<wbr>weight'
    """
    return Html(re.sub(r"([./])(?=\w)", r"\1<wbr>", escape(text)))


def with_code(text: str) -> Html:
    """Escape a line of English, and wrap the code in it in code elements.

    >>> with_code("jax.lax.pmean where there is psum(x)")
    '<code>jax.lax.pmean</code> where there is <code>psum(x)</code>'
    >>> with_code("use y = x.transpose(0, 2, 1).ravel() first")
    'use <code>y = x.transpose(0, 2, 1).ravel()</code> first'
    """
    pieces, end = [], 0
    for match in CODE.finditer(text):
        pieces += [escape(text[end : match.start()]), tag("code", match.group())]
        end = match.end()
    return join(pieces, text[end:])


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
