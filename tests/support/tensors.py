"""Tensors of many dtypes and shapes, under odd names, for tests of files."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

DTYPES = st.sampled_from(["float64", "float32", "int64", "int32", "uint64", "bool"])
TENSORS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
NAMES = st.text("ab.|:_ é", min_size=1, max_size=6)
_X = np.arange(24.0).reshape(2, 3, 4)
# Arrays that are not contiguous.
VIEWS = {"turned": _X.T, "every second": _X[:, ::2], "of one number": np.broadcast_to(np.float64(2), (3, 2))}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
