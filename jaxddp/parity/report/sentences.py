"""Sentences of the statements that a report holds as data."""

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxddp.errors import listed
from jaxddp.parity.coverage import Beyond
from jaxddp.parity.deviation import Deviation, HasDeviations, Statement, first_names, number
from jaxddp.parity.report import sentences_of_calls, sentences_of_optimizers, sentences_of_steps

MODULES = sentences_of_calls, sentences_of_steps, sentences_of_optimizers
# Form -> a sentence with the names of parts, in which <...> is left out if a part in it is empty; or a function.
SENTENCES: Mapping[str, Any] = {form: made for module in MODULES for form, made in module.SENTENCES.items()}
WORDS: Mapping[str, Mapping[Any, str]] = {name: of for module in MODULES for name, of in module.WORDS.items()}
OPTIONAL = re.compile(r"<([^<>]*)>")
# What any statement may have besides the parts of its form.
COMMON = ("side", "value", "where", "reference", "moved", "only")


FORMATS: Mapping[str, Callable[[Any], str]] = {
    **{"number": number, "extent": sentences_of_optimizers.extent, "first_names": first_names},
    **{"and": lambda names: " and ".join(map(str, names)), "commas": lambda names: ", ".join(names)},
    **{"listed": lambda names: listed(names, joint=", "), "tensor": lambda name: name or "a tensor"},
    "?": lambda condition: "",  # only a condition of <...>
    "axes": lambda order: f"{tuple(range(len(order)))}",
}


class Filling(string.Formatter):
    """Fill parts in, as numbers or names are written, or with the words for a key."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Write a part."""
        if format_spec in FORMATS:
            return FORMATS[format_spec](value)
        return WORDS[format_spec].get(value, value) if format_spec in WORDS else format(value, format_spec)

    def filled(self, sentence: str, parts: Mapping[str, Any]) -> str:
        """Fill a sentence in.

        >>> Filling().filled("{call} left out< of {of}><, {by} of it>", {"call": "mul", "of": "x", "by": ()})
        'mul left out of x'
        """

        def kept(optional: re.Match[str]) -> str:
            names = [name for _, name, _, _ in self.parse(optional[1]) if name]
            return "" if any(parts[name] in (None, "", ()) or parts[name] is False for name in names) else optional[1]

        return self.vformat(OPTIONAL.sub(kept, sentence), (), parts)


def sentence(of: Statement | Deviation) -> str:
    """Return the sentence of a statement.

    >>> sentence(Statement("label_smoothing", value=0.1, reference=0.0))
    'label smoothing 0.1, the reference has 0'
    >>> sentence(Statement("dropout_rate", jax=0.2, torch=0.1, where="0", moved="net.*", side="torch"))
    'in torch, dropout rate 0.2 instead of 0.1 in layer 0 in the update of net.*'
    """
    statement = of.what if isinstance(of, Deviation) else of
    parts = {name: _part(part) for name, part in statement.parts}
    common = {name: parts.pop(name, None) for name in COMMON}
    if (common["where"] or "").isdigit():  # of an nn.Sequential
        common["where"] = f"layer {common['where']}"
    made = SENTENCES[statement.form]
    text = Filling().filled(made, parts) if isinstance(made, str) else made(**parts)
    around = "<in {side}, >{text}< {value:.10g}>< in {where}><, the reference has {reference:.10g}>"
    around += '< in the update of {moved}>< (only the "{only}")>'
    return Filling().filled(around, common | {"text": text})


def _part(part: Any) -> Any:
    """Return a part with sentences in place of statements."""
    if isinstance(part, Statement):
        return sentence(part)
    return tuple(map(_part, part)) if isinstance(part, tuple) else part


def sentences(of: HasDeviations | Beyond) -> tuple[str, ...]:
    """Return the sentence of each deviation, or of each statement."""
    found: Iterable[Statement | Deviation] = of.statements if isinstance(of, Beyond) else of.deviations
    return tuple(map(sentence, found))


def line(of: HasDeviations) -> str:
    """Return what deviations are that are present at once, in a line."""
    return "; ".join(dict.fromkeys(sentences(of))) or "no fault"


def alternatives(beyond: Beyond) -> str:
    """Return what a difference beyond the run comes from; "": unknown."""
    return "; or ".join(sentences(beyond))
