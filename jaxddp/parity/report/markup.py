"""HTML and SVG elements that escape whatever is not markup already."""

import html
import re
from collections.abc import Iterable

# Not allowed in HTML, even escaped: control characters, and halves of surrogate pairs.
UNFIT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
NAME = r"[A-Za-z_]\w*"
BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
VALUE = rf"(?:{BRACKETS}|[\w.\"']*\w)"
# What reads as code in a line of English: a dotted or underscored name, a call, name=value, an index.
CODE = re.compile(
    rf"{NAME}(?:\.\w+)*(?:{BRACKETS}|=(?:{VALUE})?|\[[^\]]*\])|{NAME}(?:\.\w+)+|[A-Za-z]\w*_\w+", re.ASCII
)


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Iterable[str]
Attribute = str | float | None


def tag(name: str, *content: Content, **attributes: Attribute) -> Html:
    """An element.

    Args:
        content: strings, or iterables of them; what is not `Html` is escaped.
        attributes: `class_` and `aria_label` stand for class and aria-label; None leaves one out.

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
    """Pieces one after the other, each escaped unless it is markup.

    >>> join("a < b", [tag("i", "c")])
    'a &lt; b<i>c</i>'
    """
    return Html("".join(escape(piece) if isinstance(piece, str) else join(*piece) for piece in content))


def escape(text: str) -> Html:
    """Text as markup that shows it.

    >>> escape("a & b"), escape(escape("a & b"))
    ('a &amp; b', 'a &amp; b')
    """
    return text if isinstance(text, Html) else Html(html.escape(UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)))


def breakable(text: str) -> Html:
    """A tensor's name, which may be broken behind its dots and slashes.

    >>> breakable("fc.weight")
    'fc.<wbr>weight'
    """
    return Html(re.sub(r"([./])(?=\w)", r"\1<wbr>", escape(text)))


def with_code(text: str) -> Html:
    """A line of English in which what reads as code is set as code.

    >>> with_code("jax.lax.pmean where there is psum(x)")
    '<code>jax.lax.pmean</code> where there is <code>psum(x)</code>'
    """
    pieces, end = [], 0
    for match in CODE.finditer(text):
        pieces += [escape(text[end : match.start()]), tag("code", match.group())]
        end = match.end()
    return join(pieces, text[end:])


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
