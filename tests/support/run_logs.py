"""Logs of small runs."""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from jaxddp.config import TrainConfig
from jaxddp.tracking.run_folder import claim_output
from jaxddp.tracking.run_log import RunLog

CONFIG = TrainConfig(epochs=10)
STEPS_PER_EPOCH = 2


def open_log(output: Path | None, **options) -> RunLog:
    return RunLog(CONFIG, output, title="a test", examples_per_epoch=64, **options)


@contextlib.contextmanager
def claimed_log(output: Path, resume: bool = False, **options) -> Iterator[RunLog]:
    with claim_output(output, resume) as folder, open_log(folder, **options) as log:
        yield log


def train(log: RunLog, first_step: int, last_step: int) -> None:
    """Log what a trainer reports: losses 1 / step, accuracies 1 - loss, two steps per epoch."""
    for step in range(first_step, last_step + 1):
        epoch = (step + 1) // STEPS_PER_EPOCH
        metrics = {"loss": 1 / step, "accuracy": 1 - 1 / step}
        log.step(step, epoch, metrics, examples=32)
        if step % STEPS_PER_EPOCH == 0:
            log.epoch(step, epoch, metrics, metrics, examples_per_second=1000)


def write_run(output: Path, last_step: int, quiet: bool = False) -> None:
    with claimed_log(output, quiet=quiet) as log:
        train(log, 1, last_step)


def places(records: list[dict]) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in records]


SIX_STEPS = [("step", 1), ("step", 2), ("epoch", 2), ("step", 3), ("step", 4), ("epoch", 4), ("step", 5), ("step", 6)]
SIX_STEPS += [("epoch", 6)]


def read_events(file: Path) -> list:
    """Read the events of one file, with their checksums verified."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content, events, start = file.read_bytes(), [], 0
    while start < len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        payload = content[start + 12 : start + 12 + length]
        assert struct.unpack_from("<I", content, start + 12 + length) == (masked_crc32c(payload),)
        events.append(Event.FromString(payload))
        start += length + 16
    return events


def scalars(events: list) -> dict[tuple[str, int], float]:
    return {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}
