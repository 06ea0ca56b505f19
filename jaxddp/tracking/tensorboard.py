"""TensorBoard event files, written without torch and without a thread."""

import contextlib
import functools
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxddp.files import naming
from jaxddp.tracking.gradient_metrics import LOG2_BINS

FLUSH_EVERY = 10.0  # seconds
VERSION = "brain.Event:2"
# Those fields of tensorflow's event.proto and summary.proto that are written: name -> (number, type, if repeated).
MESSAGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "Event": {
        **{"wall_time": (1, "double"), "step": (2, "int64"), "file_version": (3, "string")},
        **{"summary": (5, "Summary"), "session_log": (7, "SessionLog")},
    },
    "SessionLog": {"status": (1, "int32")},
    "Summary": {"value": (1, "Value", "repeated")},
    "Value": {"tag": (1, "string"), "simple_value": (2, "float"), "histo": (5, "Histogram")},
    "Histogram": {
        **{name: (number, "double") for number, name in enumerate(("min", "max", "num", "sum", "sum_squares"), 1)},
        **{"bucket_limit": (6, "double", "repeated"), "bucket": (7, "double", "repeated")},
    },
}


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
        self._event = _event_class()
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
        checksums = [struct.pack("<I", checksum(part)) for part in (length, content)]
        with naming(self.path):
            self._file.write(b"".join([length, checksums[0], content, checksums[1]]))


def checksum(content: bytes) -> int:
    """Return the masked CRC-32C of a record.

    Source: tensorflow's tensorflow/core/lib/hash/crc32c.h

    >>> hex(checksum(b"123456789"))  # of CRC-32C 0xe3069283
    '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in content:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    return number


_TABLE = [_entry(byte) for byte in range(256)]


@functools.cache
def _event_class() -> Any:
    """Return the class of events, made of `MESSAGES`: tensorboardX and torch have it, and import torch."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="jaxddp/event.proto", package="jaxddp")
    for message, fields in MESSAGES.items():
        made = file.message_type.add(name=message)
        for name, (number, kind, *repeated) in fields.items():
            field = made.field.add(name=name, number=number, label=3 if repeated else 1)
            if kind in MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".jaxddp.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
                field.options.packed = bool(repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxddp.Event"))
