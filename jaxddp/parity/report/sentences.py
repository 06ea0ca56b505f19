"""Sentences of the statements that a report holds as data."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxddp.parity.coverage import Beyond
from jaxddp.parity.deviation import Deviation, HasDeviations, Statement
from jaxddp.parity.report.sentences_of_calls import SENTENCES as OF_CALLS
from jaxddp.parity.report.sentences_of_optimizers import SENTENCES as OF_OPTIMIZERS
from jaxddp.parity.report.sentences_of_steps import SENTENCES as OF_STEPS

# Form -> a format string, or a function of the parts.
SENTENCES: Mapping[str, Any] = {**OF_CALLS, **OF_STEPS, **OF_OPTIMIZERS}


def sentence(of: Statement | Deviation) -> str:
    """Return the sentence of a statement, with what any statement may have besides the parts of its form.

    >>> sentence(Statement("label_smoothing", value=0.1, reference=0.0))
    'label smoothing 0.1, the reference has 0'
    >>> sentence(Statement("dropout_rate", jax=0.2, torch=0.1, where="0", moved="net.*", side="torch"))
    'in torch, dropout rate 0.2 instead of 0.1 in layer 0 in the update of net.*'
    """
    statement = of.what if isinstance(of, Deviation) else of
    parts = {name: _part(part) for name, part in statement.parts}
    side, value, where, reference, moved, only = (parts.pop(name, None) for name in COMMON)
    made = SENTENCES[statement.form]
    text = made.format(**parts) if isinstance(made, str) else made(**parts)
    text = f"in {side}, {text}" if side else text
    text += "" if value is None else f" {value:.10g}"
    text += f" in {f'layer {where}' if where.isdigit() else where}" if where else ""  # a number: of an nn.Sequential
    text += "" if reference is None else f", the reference has {reference:.10g}"
    text += f" in the update of {moved}" if moved else ""
    return f'{text} (only the "{only}")' if only else text


COMMON = ("side", "value", "where", "reference", "moved", "only")


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


def either(beyond: Beyond) -> str:
    """Return what a difference beyond the run comes from; "": unknown."""
    return "; or ".join(sentences(beyond))
