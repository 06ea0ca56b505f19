"""Mistakes in clipping in words, whether the gradients show them or the updates alone."""

NO_EPSILON = "clipping divides by the norm, to which the reference adds 1e-06"


def not_clipped(norm: float) -> str:
    """Describe a port without clipping, or whose own leaves the gradients as they are."""
    return f"no gradient is clipped in these steps, {_reference(norm)}"


def at_norm(norm: float, reference: float | None) -> str:
    """Describe a port that clips at a norm; `reference`: the reference's norm, None if it does not clip.

    >>> at_norm(2.0, None), at_norm(2.0, 0.5)
    ('clipped at norm 2, the reference does not clip', 'clipped at norm 2, the reference clips at norm 0.5')
    """
    return f"clipped at norm {norm:.6g}, {_reference(reference)}"


def by_value(value: float, reference: float | None) -> str:
    """Describe a port that clips each element; `reference`: see `at_norm`."""
    return f"clipped by value, at {value:.6g}, {_reference(reference)}"


def _reference(norm: float | None) -> str:
    return "the reference does not clip" if norm is None else f"the reference clips at norm {norm:.6g}"
