"""Handwritten digits, which come with jaxddp; see digits.md for their source and licence."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("digits.csv.gz")


def digits() -> dict[str, NDArray[Any]]:
    """Return 1,797 handwritten digits: x (1797, 64), float32 from 0 to 1, and y (1797,), int64.

    The arrays are those of scikit-learn's `load_digits`, with x divided by 16.

    >>> {name: (array.shape, array.dtype.name) for name, array in digits().items()}
    {'x': ((1797, 64), 'float32'), 'y': ((1797,), 'int64')}
    """
    table = np.loadtxt(FILE, delimiter=",")  # 64 pixels and the digit
    return {"x": (table[:, :64] / 16).astype(np.float32), "y": table[:, 64].astype(np.int64)}
