"""Rates of matrix products, memory copies and all-reduces, from work that a framework does; needs neither of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.timing import Work, best_seconds

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


def sizes(smoke: bool) -> Sizes:
    """Return the sizes."""
    return Sizes(matrix=64, copied=2**12, sent=2**10, calls=2) if smoke else Sizes()


def rates(size: Sizes, count: int, product: Callable[[str], Work], copy: Work, all_reduce: Work) -> dict[str, Any]:
    """Measure all rates.

    An all-reduce counts by its bus bandwidth, which is what each GPU sends in a ring; one GPU sends nothing.

    Args:
        size: sizes of the work.
        count: number of GPUs.
        product: dtype -> products of square matrices.
        copy: copies an array.
        all_reduce: sums an array over the GPUs.

    Source: PERFORMANCE.md of nccl-tests.
    """

    def rate(amount: float, work: Work) -> float:
        return float(f"{amount / best_seconds(work, size.calls):.4g}")

    return {
        "count": count,
        "matmul_tflops": {dtype: rate(2 * size.matrix**3 / 1e12, product(dtype)) for dtype in DTYPES},
        "copy_gb_per_second": rate(2 * 4 * size.copied / 1e9, copy),  # read and written
        "all_reduce_gb_per_second": rate(4 * size.sent / 1e9 * 2 * (count - 1) / count, all_reduce)
        if count > 1
        else None,
    }
