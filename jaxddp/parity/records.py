"""Records of a run's steps, kept in files so that no run is ever held in memory at once.

A record maps stage -> tensor name -> array, for one step. `RecordWriter` writes each record to one safetensors
file; `Records` reads them back, a stage at a time.
"""

import json
import math
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxddp.parity.lazy_arrays import Arrays, Joined
from jaxddp.parity.stored_tensors import StoredTensors, write_tensors
from jaxddp.parity.sums import Summand, folded

Tensors = dict[str, np.ndarray]
Record = Mapping[str, Tensors]  # stage -> tensors, after one step

INPUTS, OUTPUTS = "inputs", "outputs"  # stages of a record of one forward pass, layer -> array
NUMBER, KIND = "optimizer", "kind"  # of the optimizer, in the notes on the parameter groups of a step of several
COUNTER = "num_batches_tracked"  # torch's BatchNorm counts its batches, jax's does not; nothing depends on it

T = TypeVar("T")

LARGE_MODEL = 2**23  # elements
HELD = 2**22  # elements of a model times the steps that are held in memory, with a few arrays of that size each

NO_EXAMPLE = np.uint64(2**64 - 1)  # fingerprint in the place of an example that a rank lacks

_BETWEEN = "|"  # stage | tensor
_FULL = ".full"  # ending of the folder with the large tensors of a record, a folder per stage


class RecordWriter:
    """Writer of one process's records.

    Args:
        folder: new or empty folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     RecordWriter(Path(folder)).write({"params": {"w": np.ones(2)}}, groups=[{"lr": 0.1}])
    ...     record = Records([Path(folder)])[0]
    ...     record["params"], record.notes
    ({'w': array([1., 1.])}, {'groups': [{'lr': 0.1}]})
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record, full: Mapping[str, Arrays] | None = None, **notes: Any) -> None:
        """Write the next record.

        Args:
            record: stage -> tensors, large ones as excerpts; see `jaxddp.parity.excerpts`.
            full: stage -> large tensors to store in full besides their excerpts.
            notes: anything that JSON can hold.

        Raises:
            TypeError: a note is not JSON serializable; nothing is written.
        """
        metadata = {"stages": json.dumps(list(record)), "notes": json.dumps(notes)}
        path = self._folder / f"{self._count:06}.safetensors"
        for stage, tensors in (full or {}).items():
            write_tensors(path.with_suffix(_FULL) / stage, tensors)
        save_file(_flat(record), path.with_suffix(".part"), metadata)
        path.with_suffix(".part").rename(path)  # a reader never sees half a record
        self._count += 1


class StoredRecord(Mapping[str, Tensors]):
    """Record of one step, read a stage at a time from the files of all processes that took part.

    Args:
        paths: one file per rank, rank 0's first.
        stacked: stages that every rank recorded; their arrays are stacked to (world_size, ...). Others are rank 0's.
        summands: see `jaxddp.parity.sums`.

    Attributes:
        notes: rank 0's notes.
    """

    def __init__(self, paths: Sequence[Path], stacked: Sequence[str], summands: Sequence[Summand] = ()):
        self._stacked, self._summands = stacked, summands
        self._files = [_File(path) for path in paths]
        self._full = paths[0].with_suffix(_FULL)
        metadata = self._files[0].metadata
        self._stages: list[str] = json.loads(metadata["stages"])
        self.notes: dict[str, Any] = json.loads(metadata["notes"])

    def __getitem__(self, stage: str) -> Tensors:
        if stage not in self._stages:
            raise KeyError(stage)
        if stage not in self._stacked:
            return dict(folded(stage, self._files[0].read(stage), self._summands))
        return stacked([dict(folded(stage, file.read(stage), self._summands)) for file in self._files])

    def full(self, stage: str) -> Arrays:
        """Return a stage of rank 0 with full tensors where they were written, else excerpts.

        Raises:
            KeyError: the stage was not recorded.
        """
        small, large = self[stage], self._full / stage
        return Joined(StoredTensors(large), small) if large.exists() else small

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)


def stacked(of_ranks: Sequence[Tensors]) -> Tensors:
    """Stack the tensors of all ranks; fingerprints of unequal numbers of examples are filled up with `NO_EXAMPLE`.

    >>> stacked([{"x": np.array([3, 4], np.uint64)}, {"x": np.array([5], np.uint64)}])["x"][1] == NO_EXAMPLE
    array([False,  True])
    """
    whole = {}
    for name in of_ranks[0]:
        arrays = [tensors[name] for tensors in of_ranks]
        if len({x.shape for x in arrays}) > 1:
            most = max(map(len, arrays))
            arrays = [np.pad(x, (0, most - len(x)), constant_values=NO_EXAMPLE) for x in arrays]
        whole[name] = np.stack(arrays)
    return whole


def full(record: Record, stage: str) -> Arrays:
    """Return a stage of a record with full tensors in place of excerpts."""
    return record.full(stage) if isinstance(record, StoredRecord) else record[stage]


def shapes_of(tensors: Arrays) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes."""
    return {name: x.shape for name, x in tensors.items()}


def steps_in_memory(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return for how many steps arrays of these shapes may be held in memory.

    >>> steps_in_memory([(1000, 1000), (1000,)])
    4
    """
    return HELD // max(1, sum(map(math.prod, shapes)))


def is_large_model(start: Arrays) -> bool:
    """Return whether a model is so large that its two sides run one after the other, and free memory at once."""
    return sum(math.prod(shape) for shape in shapes_of(start).values()) > LARGE_MODEL


class Lazy(Sequence[T]):
    """A sequence whose items are made at each access, so that only one at a time, and those to keep, are in memory.

    Args:
        count: returns the current length.
        make: index from 0 -> item.
        keep: number of items, from the first, that are held in memory once they are made.

    >>> squares = Lazy(lambda: 3, lambda index: index**2)
    >>> squares[-1], squares[1:], list(squares)
    (4, [1, 4], [0, 1, 4])
    >>> made = []
    >>> numbers = Lazy(lambda: 3, lambda index: made.append(index) or index, keep=2)
    >>> [*numbers, *numbers], made
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2])
    """

    def __init__(self, count: Callable[[], int], make: Callable[[int], T], keep: int = 0):
        self._count, self._make, self._keep = count, make, keep
        self._kept: dict[int, T] = {}

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        count = self._count()
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(count))]
        if not -count <= index < count:
            raise IndexError(index)
        return self._item(index % count)

    def _item(self, index: int) -> T:
        if index >= self._keep:
            return self._make(index)
        if index not in self._kept:
            self._kept[index] = self._make(index)
        return self._kept[index]

    def __len__(self) -> int:
        return self._count()


class Records(Lazy[StoredRecord]):
    """Records that a run has written so far.

    Args:
        folders: one folder per rank, rank 0's first.
        stacked: see `StoredRecord`.
        owner: object to keep alive with the records, such as a `Scratch` folder.
        summands: see `jaxddp.parity.sums`; some may be added later.
    """

    def __init__(
        self, folders: Sequence[Path], stacked: Sequence[str] = (), owner: Any = None, summands: Sequence[Summand] = ()
    ):
        self._folders, self._stacked, self._owner, self._summands = folders, stacked, owner, summands
        self._complete = 0
        super().__init__(self._written, lambda index: StoredRecord(self._files(index), stacked, summands))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the folders: the process that has the owner keeps them."""
        return Records, (self._folders, self._stacked, None, self._summands)

    def _written(self) -> int:
        """Return the number of steps that every process has written."""
        while all(path.exists() for path in self._files(self._complete)):
            self._complete += 1
        return self._complete

    def _files(self, index: int) -> list[Path]:
        return [folder / f"{index:06}.safetensors" for folder in self._folders]


class Scratch:
    """A temporary folder that is removed when the object is garbage-collected or Python exits.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="jaxddp-parity-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def stage_norm(tensors: Mapping[str, np.ndarray]) -> float:
    """Compute the Euclidean norm of all floating-point tensors together.

    >>> stage_norm({"w": np.array([3.0]), "b": np.array([4.0]), "steps": np.array([12])})
    5.0
    """
    return math.hypot(*(float(np.linalg.norm(value)) for value in tensors.values() if value.dtype.kind == "f"))


def scaled_by(factors: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply values by factors of their leading axes.

    >>> scaled_by(np.array([2.0, 3.0]), np.ones((2, 2))).tolist()
    [[2.0, 2.0], [3.0, 3.0]]
    """
    return values * factors.reshape(*factors.shape, *(1,) * (values.ndim - factors.ndim))


def relative(difference: float, scale: float, other: float = 0.0) -> float:
    """Return a difference over the reference's norm: the one rule for a norm of 0 in a denominator.

    Args:
        difference: norm of the difference; the result is infinite only if this is not finite.
        scale: the reference's norm.
        other: the other side's norm, which takes the place of a scale of 0. If both are 0, the result is 1.

    >>> relative(0.5, 2.0), relative(0.0, 0.0), relative(1.0, 0.0), relative(1.0, 0.0, 4.0), relative(math.nan, 1.0)
    (0.25, 0.0, 1.0, 0.25, inf)
    """
    if difference == 0:
        return 0.0
    if not math.isfinite(difference):
        return math.inf
    return min(difference / float(scale or other or difference), sys.float_info.max)


def full_norm(record: Record, stage: str) -> float:
    """Compute the norm of a stage of gradients, also where the record holds excerpts of large ones.

    >>> full_norm({"gradients": {"w": np.array([3.0])}, "norms": {"gradients:w": np.array(4.0)}}, "gradients")
    4.0
    """
    norms = {name: x for name, x in record.get("norms", {}).items() if name.startswith(f"{stage}:")}
    small = {name: x for name, x in record[stage].items() if f"{stage}:{name}" not in norms}
    return stage_norm({**small, **norms})


def of_loss(record: Record, stage: str) -> Tensors:
    """Return a local stage as computed only from the loss, also if a port's `jax_step` shows another.

    >>> of_loss({"local_loss": {"loss": np.ones(2)}}, "local_loss")
    {'loss': array([1., 1.])}
    """
    return record[f"pure_{stage}" if f"pure_{stage}" in record else stage]


def total_loss(record: Record) -> np.ndarray:
    """Return the sum of each replica's losses, (W,).

    >>> total_loss({"local_loss": {"actor": np.ones(2), "critic": np.ones(2)}})
    array([2., 2.])
    """
    return np.asarray(sum(of_loss(record, "local_loss").values()))


class _File:
    """Open file with one process's record."""

    def __init__(self, path: Path):
        self._file = safe_open(path, "numpy")
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self._names: dict[str, list[str]] = {}
        for key in self._file.keys():  # noqa: SIM118
            stage, _, name = key.partition(_BETWEEN)
            self._names.setdefault(stage, []).append(name)

    def read(self, stage: str) -> Tensors:
        names = self._names.get(stage, [])
        return {name: self._file.get_tensor(f"{stage}{_BETWEEN}{name}") for name in names}


def _flat(record: Mapping[str, Arrays]) -> Tensors:
    """Return the tensors of all stages by stage and name, as safetensors wants them."""
    return {
        f"{stage}{_BETWEEN}{name}": np.ascontiguousarray(value).reshape(np.shape(value))
        for stage, of_stage in record.items()
        for name, value in of_stage.items()
    }
