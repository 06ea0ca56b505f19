"""Numbers in the words of the console text and the HTML page."""

import math
from collections.abc import Sequence

from jaxddp.parity.findings import Numerics

FLOAT32_PRECISION = 2.0**-23


def number(value: float, digits: int = 1) -> str:
    """Format a residual or a ratio briefly.

    >>> [number(x) for x in (0, 9.4e-16, 6.6e-4, 0.3127, 1.04, 360, math.inf, math.nan)]
    ['0', '9e-16', '7e-4', '0.31', '1', '360', 'inf', '-']
    """
    if math.isnan(value):
        return "-"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.{max(2, digits)}g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def apart(a: float, b: float) -> tuple[str, str]:
    """Format two values with one digit more than it takes to tell them apart.

    >>> apart(0.12345678, 0.12345987)
    ('0.1234568', '0.1234599')
    """
    digits = next((n for n in range(4, 17) if f"{a:.{n}g}" != f"{b:.{n}g}"), 16) + 1
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


def runs(columns: Sequence[tuple[int, int]], most: int = 4) -> str:
    """Format runs (first, last) of channels, at most `most` of them.

    >>> runs([(63, 318), (0, 62)]), runs([(k, k) for k in range(5, 0, -1)])
    ('63 to 318, 0 to 62', '5, 4, 3, 2, ...')
    """
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in columns[:most]]
    return ", ".join([*shown, *["..."] * (len(columns) > most)])


def ratio(result: Numerics) -> float:
    """Return jax's float32 error over torch's, or over float32's precision if torch is exact; 1 if both are exact.

    >>> ratio(Numerics(3e-7, 2e-7, 3.0)), ratio(Numerics(0.0, 0.0, 3.0)), ratio(Numerics(2**-24, 0.0, 3.0))
    (1.5, 1.0, 0.5)
    """
    return 1.0 if result.jax == result.torch == 0 else result.jax / (result.torch or FLOAT32_PRECISION)
