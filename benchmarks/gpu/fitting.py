"""Find the largest batch that fits into a GPU's memory by trying; needs neither jax nor torch."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

Measured = dict[str, Any]
_SIGNS = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OutOfMemory")


class NothingFits(Exception):
    """Not even the smallest batch fits."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of jax or torch says that the memory is too small.

    >>> is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16 bytes."))
    True
    """
    return any(sign in f"{type(error).__name__}: {error}" for sign in _SIGNS)


def largest_that_fits(
    batches: Sequence[int], measure: Callable[[int], Measured], free: Callable[[], object]
) -> Measured:
    """Measure batch sizes in order until one fits; return its measures, its size, and the sizes that did not fit.

    Args:
        batches: sizes, the largest first.
        measure: measures one size.
        free: frees what a size that did not fit has left.

    Raises:
        NothingFits: none fits.
    """
    too_large: list[int] = []
    for size in batches:
        try:
            return {"batch_per_gpu": size, "too_large": too_large, **measure(size)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"batch of {size}: out of memory", flush=True)
        too_large.append(size)  # out of the handler, whose error keeps the arrays alive
        gc.collect()
        free()
    raise NothingFits(f"out of memory with {', '.join(map(str, too_large))} examples per GPU")
