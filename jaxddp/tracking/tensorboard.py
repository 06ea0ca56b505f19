"""TensorBoard's files, written without torch."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxddp.tracking.gradient_metrics import LOG2_BINS


def open_tensorboard(folder: Path, resume_step: int | None) -> Any:
    """A tensorboardX writer; TensorBoard then hides the steps after `resume_step`."""
    # tensorboardX imports torch wherever it is installed, which takes seconds and is of no use here.
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it would warn of every NaN
    purge_step = None if resume_step is None else resume_step + 1
    # Its file names count seconds; two runs in one second must not share a file.
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10, filename_suffix=f".{time.time_ns()}")


def write_histogram(board: Any, tag: str, counts: Sequence[int], step: int) -> None:
    """A histogram of log2 |g|, of which each of LOG2_BINS has its count."""
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
