"""Speed of a run: examples and tokens per second, and the share of the time in which its steps waited for batches."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


def tokens_in(example: Mapping[str, np.ndarray]) -> int:
    """Return the tokens of one example: the length of its longest sequence of integers; 0 if it has none.

    A sequence is an entry of a batch with two axes, examples and positions; bytes (pixels, say) do not count.

    >>> tokens_in({"x": np.zeros((2, 128), np.int32), "y": np.zeros((2, 128), np.int32)})
    128
    >>> tokens_in({"x": np.zeros((2, 64)), "y": np.zeros(2, np.int64), "image": np.zeros((2, 784), np.uint8)})
    0
    """
    return max(
        (x.shape[1] for x in example.values() if x.ndim == 2 and x.dtype.kind in "iu" and x.itemsize > 1), default=0
    )


@dataclass
class Epoch:
    """Examples of an epoch, its seconds without tests, and the seconds among them in which it waited for batches."""

    examples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0


class Throughput:
    """Speed of a run's epochs.

    Args:
        tokens: tokens of an example, see `tokens_in`.
        workers: whether other processes read the examples.
        clock: time in seconds.

    >>> clock = iter([0.0, 0.0, 1.0, 4.0, 4.0, 4.0]).__next__
    >>> speed = Throughput(tokens=128, workers=True, clock=clock)
    >>> speed.begin()
    >>> for batch in speed.waited_for(["a batch"]):
    ...     pass
    >>> speed.end(examples=20)
    5.0
    >>> print(*speed.lines(), sep=chr(10))
    5 examples/s   640 tokens/s   the step limits: the input takes 25% of the time, at least 20 examples/s
    """

    def __init__(self, tokens: int = 0, workers: bool = False, clock: Callable[[], float] = time.perf_counter):
        self._tokens, self._workers, self._clock = tokens, workers, clock
        self._epochs: list[Epoch] = []
        self._started = 0.0

    def begin(self) -> None:
        """Begin an epoch."""
        self._epochs.append(Epoch())
        self._started = self._clock()

    def waited_for(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Iterate over the batches of an epoch, and measure how long each is waited for."""
        iterator = iter(batches)
        while True:
            before = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._epochs[-1].waiting += self._clock() - before
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time within this context, a test or a checkpoint, out of the epoch's."""
        before = self._clock()
        yield
        self._started += self._clock() - before

    def end(self, examples: int) -> float:
        """End an epoch; return its examples per second."""
        epoch = self._epochs[-1]
        epoch.examples, epoch.seconds = examples, self._clock() - self._started
        return examples / epoch.seconds

    def lines(
        self, memory: int | None = None, share_of_peak: Callable[[float], str | None] = lambda rate: None
    ) -> list[str]:
        """Return the line of a summary, without the first epoch, which compiles, if there are others.

        Args:
            memory: largest number of bytes in use on a device; None: unknown.
            share_of_peak: examples per second -> the share of the device's peak, in words; None: unknown.
        """
        epochs = [epoch for epoch in self._epochs[1:] or self._epochs if epoch.examples]
        seconds, waiting = (sum(getattr(epoch, name) for epoch in epochs) for name in ("seconds", "waiting"))
        if not seconds:
            return []
        examples = sum(epoch.examples for epoch in epochs)
        rate = examples / seconds
        parts = [f"{rate:,.0f} examples/s"]
        if self._tokens:
            parts.append(f"{rate * self._tokens:,.0f} tokens/s")
        if memory is not None:
            parts.append(f"{gigabytes(memory)} per device")
        share = waiting / seconds
        at = "at least" if self._workers else "at"  # workers read while the steps run
        reading = f", {at} {examples / waiting:,.0f} examples/s" if waiting else ""
        limit = "the input" if share > 0.5 else "the step"
        parts += filter(None, [share_of_peak(rate)])
        return ["   ".join([*parts, f"{limit} limits: the input takes {share:.0%} of the time{reading}"])]


def gigabytes(number: float) -> str:
    """Write a number of bytes.

    >>> gigabytes(1_234_567_890)
    '1.23 GB'
    """
    return f"{number / 1e9:.2f} GB"
