"""Micro-batches of one optimizer step, as the loader makes them and the replica step takes them."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class MicroBatches(NamedTuple):
    """One replica's examples for one optimizer step, in the pieces that fit its memory at once.

    Attributes:
        head: all micro-batches but the last, leaves of shape (A - 1, B, ...); None if there is one.
        last: the last micro-batch, leaves of shape (B', ...), B' <= B. It stands apart because it
            may be smaller, and because the all-reduce can overlap with its backward pass.
        buffers_of: int32 scalar, the rank whose buffers go on instead of 0's; None: rank 0's.
    """

    head: Mapping[str, Any] | None
    last: Mapping[str, Any]
    buffers_of: Any = None
