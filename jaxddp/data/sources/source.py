"""Sources: examples by index, augmented and put together to batches, the same in every process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from jaxddp.data.batches import NONE, copied, example_arrays, to_arrays, widened
from jaxddp.data.sources.arrays import ArrayData, Arrays, Gathered
from jaxddp.data.sources.digests import example_digest
from jaxddp.errors import InputError, described
from jaxddp.scripts import users_frames

Augment = Callable[[Any, np.random.Generator], Any]
"""(example, its own random generator) -> example."""
Collate = Callable[[list[Any]], Any]
"""Examples -> a batch, arrays with an entry for each example."""

ERRORS = (Exception, SystemExit)  # of the user's code; sys.exit(0) there would end a run as if it were done


class Job(NamedTuple):
    """Parts of a batch to be read.

    Attributes:
        epoch: number of the epoch.
        parts: indices of the examples of each part.
    """

    epoch: int
    parts: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True)
class Source:
    """Examples of a data set; see `as_source`.

    Attributes:
        data: any object with a length and items.
        where: name of the data in messages.
        augment: changes each example with random numbers that depend only on (seed, epoch, index).
        collate: puts examples together to a batch; None: each entry is stacked.
        seed: seed of the augmentation.
        dtype: dtype of floating-point numbers; None: as they are.
        checked: raise if numbers are NaN.
    """

    data: Any
    where: str = "data"
    augment: Augment | None = None
    collate: Collate | None = None
    seed: int = 0
    dtype: str | None = None
    checked: bool = True

    def __len__(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return len(self.data)

    def take(self, indices: NDArray[np.int64], epoch: int, tell: Callable[[int], None] = lambda index: None) -> Arrays:
        """Return examples as a flat batch, see `jaxddp.data.batches`.

        Args:
            indices: indices of the examples (...).
            epoch: number of the epoch, for the augmentation.
            tell: called with the index of an example before it is read.

        Returns:
            Arrays (*indices.shape, *shape of an example's entry). With `collate`, all examples of the call make one
            batch, and only its first axis is split.

        Raises:
            InputError: an example cannot be read, has another shape or type than the others, or holds NaN.
        """
        order = indices.reshape(-1)
        if self.augment is None and self.collate is None and isinstance(self.data, Gathered):
            tell(int(order[0]) if order.size else 0)
            arrays = self.data.gather(order)
        else:
            arrays = self._put_together(self._examples(order.tolist(), epoch, tell), order)
        arrays = {name: widened(array) for name, array in arrays.items()}
        if self.dtype is not None:
            arrays = {k: x.astype(self.dtype, copy=False) if x.dtype.kind == "f" else x for k, x in arrays.items()}
        if self.checked:
            self._check_numbers(arrays, order)
        return {name: array.reshape(*indices.shape, *array.shape[1:]) for name, array in arrays.items()}

    def read(self, jobs: Iterable[Job]) -> Iterator[list[Arrays]]:
        """Yield the parts of each job in turn, like `jaxddp.data.sources.workers.DataWorkers`."""
        for job in jobs:
            yield [self.take(part, job.epoch) for part in job.parts]

    def example(self, index: int) -> Arrays:
        """Return the arrays of an example as it is read, by name; see `take`."""
        return example_arrays(self._read([index])[0], f"{self.where}[{index}]")

    def digest(self, verify: bool = False) -> str:
        """Return the SHA-256 of the data: of arrays in memory and with `verify` of all, else of a few examples."""
        if isinstance(self.data, Gathered):
            return self.data.digest(verify)
        return example_digest(len(self), self.example, sampled=not verify)

    def _examples(self, indices: Sequence[int], epoch: int, tell: Callable[[int], None]) -> list[Any]:
        if self.augment is None and hasattr(self.data, "__getitems__"):
            tell(indices[0])
            return self._read(indices)
        examples = []
        for index in indices:
            tell(index)
            (example,) = self._read([index])
            if self.augment is not None:
                try:  # with its own arrays, which it may change in place
                    example = self.augment(copied(example), generator(self.seed, epoch, index))
                except ERRORS as error:
                    raise self.located(error, f"augment: example {index}") from error
            examples.append(example)
        return examples

    def _read(self, indices: Sequence[int]) -> list[Any]:
        """Read examples, by torch's `__getitems__` if the data have it."""
        index = indices[0]
        try:
            if hasattr(self.data, "__getitems__"):
                examples = list(self.data.__getitems__(list(indices)))
                if len(examples) != len(indices):
                    raise InputError(f"{self.where}: gives {len(examples)} examples for {len(indices)} indices")
                return examples
            examples = []
            for index in indices:
                examples.append(self.data[index])
            return examples
        except IndexError as error:
            length = f"its length is {len(self)} ({described(error)})"
            raise InputError(f"{self.where}: has no example {index}, and {length}") from error
        except ERRORS as error:
            raise self.located(error, f"example {index}") from error

    def located(self, error: BaseException, where: str) -> InputError:
        """Return an error of the user's code as a line that says where it arose."""
        if isinstance(error, InputError):
            return error
        return InputError(f"{self.where}: {where}: {described(error)}", users_frames(error))

    def _put_together(self, examples: list[Any], indices: NDArray[np.int64]) -> Arrays:
        if self.collate is None:
            return self._stacked(examples, indices.tolist())
        call = f"collate, examples {indices[0]} to {indices[-1]}"
        try:
            batch = self.collate(examples)
        except ERRORS as error:
            raise self.located(error, call) from error
        arrays = to_arrays(batch, f"{self.where}: {call}")
        if (size := len(next(iter(arrays.values())))) != len(examples):
            raise InputError(f"{self.where}: {call}: its batch has {size} entries; must have {len(examples)}")
        return arrays

    def _stacked(self, examples: list[Any], indices: Sequence[int]) -> Arrays:
        leaves = [
            example_arrays(example, f"{self.where}[{index}]") for example, index in zip(examples, indices, strict=True)
        ]
        first = leaves[0]
        for arrays, index in zip(leaves, indices, strict=True):
            if arrays.keys() != first.keys():
                of_each = f"has {', '.join(arrays)}, example {indices[0]} {', '.join(first)}"
                raise InputError(f"{self.where}: example {index}: {of_each}; all must have the same entries")
            for name, array in arrays.items():
                expected = first[name]
                if (array.shape, array.dtype.kind) != (expected.shape, expected.dtype.kind):
                    of_each = f"{array.dtype} {array.shape}, of example {indices[0]} {expected.dtype} {expected.shape}"
                    fix = "all must be alike; pad or cut them, in `augment` or `collate`"
                    raise InputError(f"{self.where}: example {index}: {name} is {of_each}; {fix}")
        return {name: np.stack([arrays[name] for arrays in leaves]) for name in first}

    def _check_numbers(self, arrays: Arrays, indices: NDArray[np.int64]) -> None:
        for name, array in arrays.items():
            if array.dtype.kind != "f" or not np.isnan(array.min(initial=0)):
                continue
            place = np.argwhere(np.isnan(array))[0].tolist()
            raise InputError(
                f"{self.where}: example {indices[place[0]]}: {name}{place[1:] or ''} is nan; must be a number"
            )


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random numbers that augment an example in an epoch, the same in every process and framework.

    >>> generator(0, 1, 7).integers(0, 100, 3).tolist() == generator(0, 1, 7).integers(0, 100, 3).tolist()
    True
    """
    return np.random.Generator(np.random.PCG64([seed, epoch, index]))


def as_source(
    data: Any,
    where: str = "data",
    *,
    augment: Augment | None = None,
    collate: Collate | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    checked: bool = True,
) -> Source:
    """Return the source of a program's data.

    Args:
        data: dictionary or tuple, nested or not, of arrays of one length, in memory or mapped from disk; or an object
            with `__len__` and `__getitem__(int)`, whose items are dictionaries or tuples of numbers and arrays:
            torch's Dataset, Grain's RandomAccessDataSource, `datasets` of Hugging Face, a list; or a `Source`.
        where: name of the data in messages: "train_data()".
        augment, collate, seed, dtype, checked: see `Source`; of a `Source`, they replace what it has.

    Raises:
        InputError: the data are none of these, are empty, or have fewer examples than they say.

    >>> class Squares:
    ...     def __len__(self): return 4
    ...     def __getitem__(self, index): return {"x": np.full(2, index), "y": index**2}
    >>> as_source(Squares()).take(np.array([3, 1]), epoch=0)
    {'x': array([[3, 3],
           [1, 1]]), 'y': array([9, 1])}
    """
    if isinstance(data, Source):
        given: dict[str, Any] = {"augment": augment, "collate": collate, "seed": seed, "dtype": dtype}
        return replace(data, **{name: value for name, value in given.items() if value is not None})
    if isinstance(data, Mapping | tuple):
        flat = isinstance(data, Mapping) and all(isinstance(array, np.ndarray) for array in data.values())
        arrays: Mapping[str, NDArray[Any]] = cast(Arrays, data) if flat else example_arrays(data, where)
        sizes = {name: len(x) if x.ndim else 0 for name, x in arrays.items() if not name.endswith(NONE)}
        if len(set(sizes.values())) != 1:
            raise InputError(f"{where}: arrays of different lengths: {sizes}")
        nothing = np.zeros((next(iter(sizes.values())), 0), np.uint8)
        data = ArrayData({name: nothing if name.endswith(NONE) else x for name, x in arrays.items()})
    elif not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        stream = "; streams are for train_data()" * hasattr(data, "__iter__")
        raise InputError(
            f"{where}: must be a dictionary of arrays, or have __len__ and __getitem__, "
            f"and is {type(data).__name__}{stream}"
        )
    source = Source(data, where, augment, collate, seed or 0, dtype, checked)
    try:
        size = len(source)
    except ERRORS as error:
        raise source.located(error, "__len__") from error
    if not size:
        raise InputError(f"{where}: has no examples")
    if not isinstance(data, Gathered):
        for index in (0, len(source) - 1):
            source.example(index)
    return source
