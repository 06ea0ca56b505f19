"""Training and test examples of a run, as its program gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.config import TrainerConfig
from jaxddp.config.checks import typed
from jaxddp.data.batches import NONE, WITHIN, example_arrays, to_arrays
from jaxddp.data.sources import Source, as_source
from jaxddp.data.sources.arrays import is_mapped
from jaxddp.data.sources.stream import Stream, StreamSource, class_of_torch, is_stream
from jaxddp.errors import InputError
from jaxddp.program import Program

PADDING = "valid"  # entry of a batch that is the loader's
AT_ONCE = 1024  # examples that are looked through for NaN
# Flags that ask for examples by index, or for their number.
NOT_OF_STREAMS = ("data_workers", "verify_data", "drop_last", "drop_last_batch", "join", "print_shards")


@dataclass(frozen=True, eq=False)
class RunData:
    """Examples of a run.

    Attributes:
        train: training examples.
        tests: test examples, by the beginning of their metrics' names: "" of the only ones, "noisy_" of several.
        verified: digests are of all contents, also of files that are mapped.
    """

    train: Source
    tests: Mapping[str, Source]
    verified: bool = False

    def example(self) -> dict[str, np.ndarray]:
        """Return a batch of the first training examples, two at most."""
        return self.train.take(np.arange(min(2, len(self.train))), 0)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the training and of the test examples; a stream has none."""
        parts = {} if self.stream else {"train": self.train}
        parts |= {f"test_{prefix}".removesuffix("_"): source for prefix, source in self.tests.items()}
        return {name: source.digest(self.verified) for name, source in parts.items()}

    def full_name(self, metric: str) -> str:
        """Return the name that a metric of a test has: of several test sets, that of the first if none is named."""
        first = next(iter(self.tests), "")
        return metric if any(map(metric.startswith, filter(None, self.tests))) else first + metric

    @property
    def judged(self) -> str:
        """Split by whose metrics the run is judged: "test" or, without test examples, "train"."""
        return "test" if self.tests else "train"

    @property
    def stream(self) -> Stream | None:
        """Stream of the training examples; None if they have indices."""
        return self.train.data if isinstance(self.train, StreamSource) else None

    def place_of_nan(self) -> str | None:
        """Describe the first NaN among examples in memory; those of other sources are checked as they are read."""
        for source in (self.train, *self.tests.values()):
            if source.checked:
                continue
            stored = replace(source, checked=True, augment=None, collate=None)
            try:
                for first in range(0, len(stored), AT_ONCE):
                    stored.take(np.arange(first, min(first + AT_ONCE, len(stored))), 0)
            except InputError as error:
                return f"{error}"
        return None

    def position(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of a step notes of the stream's position; nothing of other data."""
        return {} if self.stream is None else {"stream": self.stream.note(step)}

    def begin(self, config: TrainerConfig, step: int, notes: Mapping[str, Any]) -> list[str]:
        """Go to the stream's position from which a run continues, and return lines on it; other data have none.

        Args:
            step, notes: step of the checkpoint to resume, and what it notes.
        """
        if self.stream is None or config.output is None:
            return []
        if config.resume is None:
            return self.stream.check_state()
        skipped = self.stream.resume(step, notes.get("stream"))
        lines = [f"{self.train.where}: a stream has no digest; nothing checks that it is the one of the run so far"]
        if skipped:
            lines.append(f"{self.train.where}: has no state to load; {skipped:,} examples were read and skipped")
        return lines


def load_data(program: Program, config: TrainerConfig) -> RunData:
    """Call `train_data` and `test_data`; floating-point numbers get the dtype of `config`.

    Raises:
        InputError: the data are not those of a source, or name an entry like the padding.
    """
    data = program.get("train_data")()
    make = _stream if is_stream(data) else _source
    if make is _source and config.steps_per_epoch is not None:
        what = f"is for streams, and {program.name}: train_data() has a length"
        raise InputError(f"{typed('steps_per_epoch', config.steps_per_epoch)}: {what}")
    train = make(program, f"{program.name}: train_data()", data, config, program.get("augment"))
    test_data, where = program.get("test_data"), f"{program.name}: test_data()"
    sets = {} if test_data is None else _test_sets(where, test_data(), train)
    tests = {
        prefix: _checked(_source(program, f"{where}[{prefix[:-1]!r}]" if prefix else where, of_set, config))
        for prefix, of_set in sets.items()
    }
    return RunData(_checked(train), tests, config.verify_data)


def _test_sets(where: str, data: Any, train: Source) -> dict[str, Any]:
    """Return test data by the beginning of their metrics' names: a dictionary of data sets is several.

    Raises:
        InputError: some of its names are entries of a training example, or are no identifiers.
    """
    if not isinstance(data, Mapping) or not data or not all(map(_is_data_set, data.values())):
        return {"": data}
    entries = {name.removesuffix(NONE).partition(WITHIN)[0] for name in train.example(0)}
    if (shared := [name for name in data if name in entries]) and len(shared) < len(data):
        raise InputError(f"{where}: {', '.join(shared)}: is an entry of a training example; must be a test set's name")
    if shared:
        return {"": data}
    if bad := [name for name in data if not f"{name}_".isidentifier()]:
        raise InputError(f"{where}: {bad[0]}: is no name for a test set; must be like clean or noisy_2")
    return {f"{name}_": of_set for name, of_set in data.items()}


def _is_data_set(value: Any) -> bool:
    """Return whether a value may be a whole data set: no array, and no list of numbers or arrays."""
    if isinstance(value, Mapping | tuple | Source):
        return True
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping | tuple)
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not hasattr(value, "dtype")


def _source(program: Program, where: str, data: Any, config: TrainerConfig, augment: Any = None) -> Source:
    in_memory = isinstance(data, Mapping | tuple) and not is_mapped(example_arrays(data, where))
    if in_memory:
        arrays = to_arrays(data, where)
        data = {name: x.astype(config.dtype, copy=False) if x.dtype.kind == "f" else x for name, x in arrays.items()}
    return as_source(
        data,
        where,
        augment=augment,
        collate=program.get("collate"),
        seed=config.seed,
        dtype=config.dtype,
        checked=not in_memory,  # numbers in memory that are not finite are the training step's to report
    )


def _stream(program: Program, where: str, data: Any, config: TrainerConfig, augment: Any) -> Source:
    if (loader := class_of_torch("DataLoader")) is not None and isinstance(data, loader):
        raise InputError(f"{where}: is a {type(data).__name__}, which gives batches; return its dataset")
    if config.steps_per_epoch is None:
        raise InputError(f"{where}: is a stream, whose length is not known; give --steps-per-epoch")
    given = [name for name in NOT_OF_STREAMS if getattr(config, name)]
    given += ["shuffle"] * (config.shuffle == "index")
    if given or program.get("sampler"):
        what = typed(given[0], getattr(config, given[0])) if given else f"{program.name}: sampler"
        raise InputError(f"{what}: needs examples with indices, and {where} is a stream")
    return StreamSource(
        Stream(program.get("train_data"), config.steps_per_epoch, config.global_batch_size, where, data),
        where,
        augment,
        program.get("collate"),
        config.seed,
        config.dtype,
    )


def _checked(source: Source) -> Source:
    if PADDING in source.take(np.zeros(1, np.int64), 0):
        raise InputError(f"{source.where}: {PADDING}: is the name of padding; choose another")
    return source
