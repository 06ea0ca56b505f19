"""Means over replicas in fewer bits, as programs compute them."""

import ml_dtypes
import numpy as np

_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# Dtype on the wire, precision of the sum, precision of the division: "wire" or "wide".
WIRES = tuple(
    f"{dtype},{summed},{divided}" for dtype in _DTYPES for summed in ("wire", "wide") for divided in ("wire", "wide")
)


def mean_of(local: np.ndarray, wire: str = "") -> np.ndarray:
    """Return the mean over the first axis, (1, ...).

    Args:
        local: values of W replicas, (W, ...).
        wire: one of `WIRES`; "": the array's dtype throughout.

    >>> mean_of(np.array([[1.0], [1.001]]), "bfloat16,wide,wide")
    array([[1.]])
    """
    if not wire:
        return local.mean(0, keepdims=True)
    name, summed, divided = wire.split(",")
    dtype = _DTYPES[name]
    sent = local.astype(np.float32).astype(dtype)
    if summed == "wide":
        total = sent.astype(np.float32).sum(0, keepdims=True)
    else:
        total = sent[:1]
        for other in sent[1:]:
            total = (total + other[None]).astype(dtype)
    if divided == "wire":
        return (total.astype(dtype) / dtype(len(local))).astype(dtype).astype(local.dtype)
    return total.astype(local.dtype) / len(local)
