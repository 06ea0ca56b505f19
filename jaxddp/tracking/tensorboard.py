"""TensorBoard event files, written without torch and without a thread."""

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxddp.files import naming
from jaxddp.tracking.gradient_metrics import LOG2_BINS

FLUSH_EVERY = 10.0  # seconds
VERSION = "brain.Event:2"


class EventFile:
    """Event file of TensorBoard in a folder.

    tensorboardX's own writer works in a thread, where a full disk prints a traceback and then blocks the run.

    Args:
        folder: TensorBoard's folder; created if it is missing.
        resume_step: step after which TensorBoard hides what an earlier process wrote; None: a new run.

    Raises:
        OSError: from every method, if the file cannot be written.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        self._event, self._checksum = _from_tensorboard()
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the time from the name; nanoseconds distinguish runs that start within a second.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
        self.path = folder / name
        self._file = self.path.open("xb")
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._write(file_version=VERSION)
            if resume_step is not None:
                self._write(step=resume_step + 1, file_version=VERSION)
                self._write(step=resume_step + 1, session_log={"status": 1})  # START: hides this step and later ones
            self._flush()
            failed.pop_all()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write metrics by tag."""
        self._values([{"tag": tag, "simple_value": value} for tag, value in values.items()], step)

    def histogram(self, tag: str, counts: Sequence[int], step: int) -> None:
        """Write a histogram of log2 |g|, with one count for each of `LOG2_BINS`."""
        middles = [k + 0.5 for k in LOG2_BINS]
        content = {
            "min": LOG2_BINS[0],
            "max": LOG2_BINS[-1] + 1,
            "num": sum(counts),
            "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            "sum_squares": sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            "bucket_limit": [k + 1 for k in LOG2_BINS],
            "bucket": list(counts),
        }
        self._values([{"tag": tag, "histo": content}], step)

    def close(self) -> None:
        """Close the file."""
        with naming(self.path):
            self._file.close()

    def _flush(self) -> None:
        with naming(self.path):
            self._file.flush()
        self._flushed = time.monotonic()

    def _values(self, values: list[dict[str, Any]], step: int) -> None:
        self._write(step=step, summary={"value": values})
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._flush()

    def _write(self, **fields: Any) -> None:
        """Append an event as a TFRecord: length, its checksum, content, its checksum."""
        content = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, content)]
        with naming(self.path):
            self._file.write(b"".join([length, checksums[0], content, checksums[1]]))


def _from_tensorboard() -> tuple[Any, Any]:
    """Return the class of events and the checksum of their records."""
    # tensorboardX imports torch if it is installed, which takes seconds and is not needed.
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c
    finally:
        if hide:
            del sys.modules["torch"]
    return Event, masked_crc32c
