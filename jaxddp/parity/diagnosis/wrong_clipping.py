"""Mistakes in clipping, whether the gradients show them or only the updates."""

from collections.abc import Iterator
from typing import Any

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.deviation import Deviation, Statement, Value, as_code, rounded

ClippingFault = tuple[Deviation, dict[str, Any]]  # a mistake, and the fields of `Clipping` that it changes


def wrong_clipping(reference: Clipping, world_size: int) -> Iterator[ClippingFault]:
    """Yield the mistakes that have no number.

    >>> [wrong.kind for wrong, _ in wrong_clipping(Clipping(1.0), world_size=1)]
    ['clip_missing', 'clip_epsilon']
    """
    if reference != NOT_CLIPPED:
        yield (
            Deviation("clip_missing", Statement("not_clipped", torch=_rule(reference))),
            {"max_norm": None, "largest": None},
        )
    if reference.max_norm is None:
        return
    yield Deviation("clip_epsilon", Statement("clipping_epsilon", torch=reference.epsilon)), {"epsilon": 0.0}
    for power in (0.5, 1.0, -0.5):
        if world_size > 1:
            what = Statement("clipped_by_scaled_norm", factor=world_size**power, power=power)
            times = Value(as_code(world_size**power), "1", key="norm", is_factor=True)
            yield Deviation("clip_norm_local", what, (times,)), {"norm_scale": world_size**power}


def at_norm(norm: float, epsilon: float, reference: Clipping) -> ClippingFault:
    """Return clipping at another norm.

    >>> at_norm(2.0, 1e-6, Clipping(0.5))[0].values
    (Value(jax='2', torch='0.5', call='', key='', is_factor=False),)
    """
    what = Statement("clipped_at_norm", jax=rounded(norm, 6), torch=_rule(reference))
    value = _value(norm, reference.max_norm)
    return Deviation("clip_norm", what, (value,)), {"max_norm": norm, "epsilon": epsilon, "largest": None}


def by_value(value: float, reference: Clipping) -> ClippingFault:
    """Return clipping of each element at a value."""
    what = Statement("clipped_by_value", jax=rounded(value, 6), torch=_rule(reference))
    values = (_value(value, reference.largest),)
    return Deviation("clip_by_value", what, values), {"max_norm": None, "largest": value}


def _value(value: float, reference: float | None) -> Value:
    return Value(f"{value:.6g}", "" if reference is None else as_code(reference))


def _rule(reference: Clipping) -> Statement:
    if reference.largest is not None:
        return Statement("clips_by_value", at=reference.largest)
    at = reference.max_norm
    return Statement("does_not_clip") if at is None else Statement("clips_at_norm", at=at)
