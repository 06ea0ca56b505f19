"""TensorBoard event files, written without torch."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxddp.tracking.gradient_metrics import LOG2_BINS


def open_tensorboard(folder: Path, resume_step: int | None) -> Any:
    """Open a tensorboardX writer; TensorBoard hides steps after `resume_step` that an earlier process wrote."""
    # tensorboardX imports torch if it is installed, which takes seconds and is not needed.
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # silence a warning per NaN
    purge_step = None if resume_step is None else resume_step + 1
    # Event files are named by the second; the suffix distinguishes runs that start within one.
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10, filename_suffix=f".{time.time_ns()}")


def write_histogram(board: Any, tag: str, counts: Sequence[int], step: int) -> None:
    """Write a histogram of log2 |g|, with one count for each of `LOG2_BINS`."""
    middles = [k + 0.5 for k in LOG2_BINS]
    board.add_histogram_raw(
        tag,
        min=LOG2_BINS[0],
        max=LOG2_BINS[-1] + 1,
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        bucket_limits=[k + 1 for k in LOG2_BINS],
        bucket_counts=list(counts),
        global_step=step,
    )
