"""Sizes of the measured rates, and what a time means as a rate; needs neither jax nor torch."""

from dataclasses import dataclass

DTYPES = ("bf16", "tf32", "float32")


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is multiplied, copied and sent.

    Attributes:
        matrix: rows and columns of the matrices.
        copied, sent: float32 numbers in an array.
        calls: calls per repeat.
    """

    matrix: int = 8192
    copied: int = 2**28
    sent: int = 2**26
    calls: int = 10


SMALL = Sizes(matrix=64, copied=2**12, sent=2**10, calls=2)


def sizes(smoke: bool) -> Sizes:
    """Return the sizes."""
    return SMALL if smoke else Sizes()


def tflops(size: int, seconds: float) -> float:
    """Return the rate of a product of square matrices, in TFLOP/s.

    >>> tflops(1000, 1.0)
    0.002
    """
    return _rounded(2 * size**3 / seconds / 1e12)


def copy_rate(numbers: int, seconds: float) -> float:
    """Return the rate of a copy of float32 numbers, in GB/s read and written.

    >>> copy_rate(10**9, 1.0)
    8.0
    """
    return _rounded(2 * 4 * numbers / seconds / 1e9)


def bus_rate(numbers: int, count: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce of float32 numbers, in GB/s: what each GPU sends in a ring.

    Source: PERFORMANCE.md of nccl-tests.

    >>> bus_rate(10**9, 4, 1.0)
    6.0
    """
    return _rounded(4 * numbers / seconds / 1e9 * 2 * (count - 1) / count)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
