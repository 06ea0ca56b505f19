"""Micro-batches of one optimizer step, which the loader yields and the replica step takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class MicroBatches(NamedTuple):
    """Examples of one replica for one optimizer step, in A micro-batches.

    Attributes:
        head: all micro-batches but the last, leaves of shape (A - 1, B, ...); None if A is 1.
        last: last micro-batch, leaves of shape (B', ...), B' <= B. It is separate because it
            may be smaller, and because the all-reduce can overlap with its backward pass.
        buffers_of: int32 scalar, rank whose buffers are kept; None: rank 0.
    """

    head: Mapping[str, Any] | None
    last: Mapping[str, Any]
    buffers_of: Any = None
