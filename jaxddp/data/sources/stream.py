"""Streams: examples that come one after another, without a number by which they can be asked for.

    stream         0 1 2 3 | 4 5 6 7 | 8 9 ...      B = 4 examples per step; a pass that ends is followed by another
    replica 0 of 2 0   2   | 4   6   | 8            example i goes to replica i mod 2, in both frameworks
    position       state_dict() after every B examples, kept until the step that has consumed them is saved

Each process reads all examples, and keeps those of its replicas.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.batches import are_equal, example_arrays
from jaxddp.data.sources.arrays import Arrays
from jaxddp.data.sources.digests import array_digest
from jaxddp.data.sources.source import ERRORS, Job, Source
from jaxddp.data.sources.stream_state import from_json, to_json
from jaxddp.errors import InputError

SAVE, LOAD = "state_dict", "load_state_dict"  # torch's StatefulDataLoader asks data for these


def is_stream(data: Any) -> bool:
    """Return whether data have `__iter__`, and no length and items.

    >>> is_stream(iter([])), is_stream([]), is_stream({})
    (True, False, False)
    """
    items = getattr(type(data), "__getitem__", None)
    dataset = class_of_torch("Dataset")  # whose abstract items its IterableDataset inherits
    abstract = dataset is not None and items is dataset.__getitem__
    indexed = items is not None and not abstract and hasattr(data, "__len__")
    return hasattr(data, "__iter__") and not indexed and not isinstance(data, Mapping | Source)


def class_of_torch(name: str) -> Any:
    """Return a class of torch.utils.data; None unless torch is imported, as it is where there are objects of the class.

    >>> class_of_torch("no such class") is None
    True
    """
    return getattr(sys.modules.get("torch.utils.data"), name, None)


class Stream:
    """Read a stream forward, as an endless sequence of examples, and go back to a position in it.

    Args:
        make: returns the stream; called again to go back.
        steps_per_epoch: N, optimizer steps per epoch.
        batch_size: B, examples per step over all replicas.
        where: name of the stream in messages.
        first: what `make` has returned already.
    """

    def __init__(
        self, make: Callable[[], Any], steps_per_epoch: int, batch_size: int, where: str = "data", first: Any = None
    ):
        self._make, self.batch_size, self._where = make, batch_size, where
        self._steps_per_epoch = steps_per_epoch
        self._held: dict[int, Any] = {}  # examples by number
        self._notes: dict[int, Any] = {}  # positions after steps, see `note`
        self._epoch = 0
        self._open(make() if first is None else first)

    def __len__(self) -> int:
        """Return the examples per epoch."""
        return self._steps_per_epoch * self.batch_size

    def __getitem__(self, index: int) -> Any:
        """Return an example of the epoch that `hold` has read last."""
        return self._held[self._epoch * len(self) + index]

    @property
    def has_state(self) -> bool:
        """Return whether the stream can tell its position, and go to it."""
        return any(hasattr(x, SAVE) and hasattr(x, LOAD) for x in (self._data, self._iterator))

    def hold(self, epoch: int, indices: NDArray[np.int64]) -> None:
        """Read the batches of examples of an epoch, which stay until later ones are read."""
        self._epoch = epoch
        first, last = epoch * len(self) + int(indices.min()), epoch * len(self) + int(indices.max())
        if first in self._held and last < self._number:
            return
        first, end = (number - number % self.batch_size for number in (first, last + self.batch_size))
        self.seek(first)
        for number in [number for number in self._held if number < first]:
            del self._held[number]
        start = epoch * self._steps_per_epoch  # BatchNorm's statistics of an average take the epoch again
        self._notes = {s: note for s, note in self._notes.items() if s == start or s * self.batch_size >= first}
        while self._number < end:
            self._read()

    def seek(self, first: int) -> None:
        """Go to an example, if it is not held: from the nearest position before it that is known, by reading."""
        if first in self._held:
            return
        known = (step for step, note in self._notes.items() if note is not None and step * self.batch_size <= first)
        nearest = max(known, default=0)
        if first < self._number or nearest * self.batch_size > self._number:
            data, note = self._make(), self._notes.get(nearest)
            if data is self._data and note is None:
                raise InputError(
                    f"{self._where}: must return a new stream at each call, to be read from its start again"
                )
            self._held.clear()
            self._close()
            self._open(data, nearest, note)
        while self._number < first:
            self._next()

    def note(self, step: int) -> Any:
        """Return the position after an optimizer step, as JSON; None if the stream has no state."""
        return self._notes.get(step)

    def resume(self, step: int, note: Any) -> int:
        """Go to the position after an optimizer step of an earlier process; return the examples that were skipped."""
        usable = note is not None and self.has_state
        self._notes = {step: note} if usable else {}
        self.seek(step * self.batch_size)
        return 0 if usable else step * self.batch_size

    def check_state(self) -> list[str]:
        """Load the present state into another stream, and return a line if it does not continue with the same example.

        Raises:
            InputError: the state is not JSON, or cannot be loaded.
        """
        note = self._position()
        if note is None:
            return [f"{self._where}: has no {SAVE}; a resumed run reads it from its start, and skips what it has used"]
        other, data = copy.copy(self), self._make()
        if data is self._data:
            raise InputError(f"{self._where}: must return a new stream at each call")
        other._held, other._notes = {}, {}
        other._open(data, note=note)
        pair = (self._held[self._number - 1], self._read(), other._next())
        last, following, found = (example_arrays(example, self._where) for example in pair)
        other._close()
        if are_equal(following, found):
            return []
        what = "the same again; count an example before you yield it" if are_equal(last, found) else "another one"
        return [f"{self._where}: a resumed run will differ: after a {LOAD}, the next example is {what}"]

    # ---- one pass after another

    def _open(self, data: Any, step: int = 0, note: Any = None) -> None:
        """Begin to read data, from a position of which `note` tells."""
        self._data, self._number = data, step * self.batch_size
        self._pass: int = 0 if note is None else note["pass"]
        self._in_pass: int = 0 if note is None else note["example"]
        self._iterate(note)

    def _iterate(self, note: Any = None) -> None:
        """Begin a pass, in the order of torch's StatefulDataLoader: state of the data, iterator, its state."""
        call = "set_epoch"
        try:
            if hasattr(self._data, call):
                self._data.set_epoch(self._pass)
            call = LOAD
            if note is not None and note["data"] is not None:
                self._data.load_state_dict(from_json(note["data"]))
            call = "__iter__"
            self._iterator: Any = iter(self._data)
            call = LOAD
            if note is not None and note["iterator"] is not None:
                self._iterator.load_state_dict(from_json(note["iterator"]))
        except ERRORS as error:
            raise self._located(error, call) from error

    def _read(self) -> Any:
        """Read an example, and hold it."""
        number = self._number
        self._held[number] = example = self._next()
        return example

    def _next(self) -> Any:
        while True:
            try:
                example = next(self._iterator)
            except StopIteration:
                if not self._in_pass:
                    again = f" when it is iterated again, after {self._number}" if self._number else ""
                    raise InputError(f"{self._where}: has no example{again}") from None
                self._pass, self._in_pass = self._pass + 1, 0
                self._iterate()
                continue
            except ERRORS as error:
                epoch, index = divmod(self._number, len(self))
                raise self._located(error, f"epoch {epoch + 1}: example {index}") from error
            self._number, self._in_pass = self._number + 1, self._in_pass + 1
            if self._number % self.batch_size == 0:
                self._notes[self._number // self.batch_size] = self._position()
            return example

    def _position(self) -> dict[str, Any] | None:
        """Return the position after the last example, as JSON."""
        states: dict[str, Any] = {"data": None, "iterator": None}
        for name, of in (("data", self._data), ("iterator", self._iterator)):
            if hasattr(of, SAVE) and hasattr(of, LOAD) and (name == "data" or of is not self._data):
                try:
                    state = of.state_dict()
                except ERRORS as error:
                    raise self._located(error, SAVE) from error
                states[name] = to_json(state, f"{self._where}: {SAVE}()")
        return {"pass": self._pass, "example": self._in_pass, **states} if self.has_state else None

    def _close(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    def _located(self, error: BaseException, call: str) -> InputError:
        return Source(self._data, self._where).located(error, call)


@dataclass(frozen=True)
class StreamSource(Source):
    """Examples of a `Stream`, by their numbers in an epoch, which must be asked for in order; see `stream`."""

    def take(self, indices: NDArray[np.int64], epoch: int, tell: Callable[[int], None] = lambda index: None) -> Arrays:
        """Return examples as a flat batch; see `Source.take`."""
        self.data.hold(epoch, indices)
        return Source.take(replace(self, where=f"{self.where}: epoch {epoch + 1}"), indices, epoch, tell)

    def read(self, jobs: Iterable[Job]) -> Iterator[list[Arrays]]:
        """Yield the parts of each job in turn."""
        for job in jobs:
            self.data.hold(job.epoch, np.concatenate([part.reshape(-1) for part in job.parts]))
            yield [self.take(part, job.epoch) for part in job.parts]

    def example(self, index: int) -> Arrays:
        """Return the arrays of an example of the first epoch; see `Source.example`."""
        self.data.hold(0, np.array([index]))
        return super().example(index)

    def check_read(self, batch_size: int, num_workers: int, sampler: Any) -> None:
        """Raise `InputError` if a loader with these arguments cannot read a stream."""
        if batch_size != self.data.batch_size:
            raise InputError(f"{self.where}: is a stream for a global batch size of {self.data.batch_size}")
        if num_workers or sampler is not None:
            what = f"num_workers {num_workers}" if num_workers else "sampler"
            raise InputError(f"{what}: needs examples with indices, and {self.where} is a stream")

    def digest(self, verify: bool = False) -> str:
        """Return the SHA-256 of the first example, before training: what is known of a stream before it is read."""
        return array_digest(self.example(0))


def stream(
    make: Callable[[], Any], *, steps_per_epoch: int, global_batch_size: int, where: str = "data", **options: Any
) -> StreamSource:
    """Return the source of a stream's examples, for a loader with this global batch size.

    Args:
        make: returns an object with `__iter__`, endless or not; one that ends is iterated again, after its
            `set_epoch(pass)` if it has that. It is called again to go back to an earlier example.
        steps_per_epoch: optimizer steps per epoch; the next epoch continues with the example after the last one.
        global_batch_size: examples per step over all replicas.
        where: name of the stream in messages.
        options: `augment`, `collate`, `seed`, `dtype` and `checked` of a `Source`.

    Raises:
        InputError: the stream has no example, or cannot be read.

    >>> source = stream(lambda: ({"x": i} for i in range(99)), steps_per_epoch=2, global_batch_size=4)
    >>> len(source), source.take(np.array([5, 6]), epoch=1)
    (8, {'x': array([13, 14])})
    """
    source = StreamSource(Stream(make, steps_per_epoch, global_batch_size, where), where, **options)
    source.take(np.zeros(1, np.int64), 0)
    return source
