"""Moments of a call's result, by which the calls of two programs are compared."""

import numpy as np

from jaxddp.parity.operations import moments


def test_memory_that_was_not_written_has_moments() -> None:
    """A signalling NaN, as torch.empty may return, raises a floating-point flag when it is cast to float64."""
    unwritten = np.array([0x7F80_0001, 0x3F80_0000], np.uint32).view(np.float32)
    assert moments(unwritten) == moments(np.array([np.nan, 1.0]))
