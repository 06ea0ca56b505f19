"""Mistakes in clipping, whether the gradients show them or only the updates."""

from collections.abc import Iterator
from typing import Any

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.deviation import Deviation, Value, as_code

ClippingFault = tuple[Deviation, dict[str, Any]]  # a mistake, and the fields of `Clipping` that it changes


def wrong_clipping(reference: Clipping, world_size: int) -> Iterator[ClippingFault]:
    """Yield the mistakes that have no number.

    >>> [wrong.kind for wrong, _ in wrong_clipping(Clipping(1.0), world_size=1)]
    ['clip_missing', 'clip_epsilon']
    """
    if reference != NOT_CLIPPED:
        says = f"no gradient is clipped in these steps, {_in_words(reference)}"
        yield Deviation("clip_missing", says), {"max_norm": None, "largest": None}
    if reference.max_norm is None:
        return
    says = f"clipping divides by the norm, to which the reference adds {reference.epsilon:g}"
    yield Deviation("clip_epsilon", says), {"epsilon": 0.0}
    for power, what in ((0.5, "the root of the"), (1.0, "the"), (-0.5, "one over the root of the")):
        if world_size > 1:
            says = f"clipped by a norm times {world_size**power:.4g}, {what} number of replicas"
            times = Value(as_code(world_size**power), "1", key="norm", is_factor=True)
            yield Deviation("clip_norm_local", says, (times,)), {"norm_scale": world_size**power}


def at_norm(norm: float, epsilon: float, reference: Clipping) -> ClippingFault:
    """Return clipping at another norm.

    >>> at_norm(2.0, 1e-6, NOT_CLIPPED)[0].says, at_norm(2.0, 1e-6, Clipping(0.5))[0].says
    ('clipped at norm 2, the reference does not clip', 'clipped at norm 2, the reference clips at norm 0.5')
    """
    says = f"clipped at norm {norm:.6g}, {_in_words(reference)}"
    value = _value(norm, reference.max_norm)
    return Deviation("clip_norm", says, (value,)), {"max_norm": norm, "epsilon": epsilon, "largest": None}


def by_value(value: float, reference: Clipping) -> ClippingFault:
    """Return clipping of each element at a value."""
    says = f"clipped by value, at {value:.6g}, {_in_words(reference)}"
    values = (_value(value, reference.largest),)
    return Deviation("clip_by_value", says, values), {"max_norm": None, "largest": value}


def _value(value: float, reference: float | None) -> Value:
    return Value(f"{value:.6g}", "" if reference is None else as_code(reference))


def _in_words(reference: Clipping) -> str:
    if reference.largest is not None:
        return f"the reference clips by value, at {reference.largest:.6g}"
    at = reference.max_norm
    return "the reference does not clip" if at is None else f"the reference clips at norm {at:.6g}"
