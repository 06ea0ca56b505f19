"""Streams of the three kinds that tell their position, or do not; endless ones and those that end."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def example(number: int, epoch: int = 0) -> Any:
    x = np.random.default_rng([number, epoch]).standard_normal(3)
    return {"id": number + 1000 * epoch, "inner": (x, None), "y": x[:1].astype(np.float32)}


class Endless:
    """A stream that has no state."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0
        self.size = 10**9
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.size):
            yield example(number)


class Stateful(Endless):
    """A stream that ends, and whose state is that of its iteration."""

    def __init__(self, size: int = 37) -> None:
        super().__init__()
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            self.at += 1
            yield example(self.at - 1, self.epoch)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": np.random.PCG64(3).state, "seen": {0: (np.arange(2), None)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rng"] == np.random.PCG64(3).state and state["seen"][0][0].tolist() == [0, 1]
        self.at = state["at"]


class Late(Stateful):
    """A stream that counts an example after it has yielded it."""

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            yield example(self.at, self.epoch)
            self.at += 1
        self.at = 0


class Noisy(Stateful):
    """A stream whose examples depend on more than its state."""

    drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for of_state in super().__iter__():
            Noisy.drawn += 1
            yield of_state | {"noise": Noisy.drawn}


class Iterated(Endless):
    """A stream whose iterator has the state."""

    def __iter__(self) -> Any:
        return Counting()


class Counting(Stateful):
    """An iterator with a state."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return example(self.at - 1)
