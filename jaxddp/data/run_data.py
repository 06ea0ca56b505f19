"""Training and test examples of a run, as its program gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxddp.config import TrainerConfig
from jaxddp.config.checks import typed
from jaxddp.data.batches import example_arrays, to_arrays
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
        test: test examples; None: the program has none.
        verified: digests are of all contents, also of files that are mapped.
    """

    train: Source
    test: Source | None
    verified: bool = False

    def example(self) -> dict[str, np.ndarray]:
        """Return a batch of the first training examples, two at most."""
        return self.train.take(np.arange(min(2, len(self.train))), 0)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the training and of the test examples; a stream has none."""
        parts = {"train": None if self.stream else self.train, "test": self.test}
        return {name: source.digest(self.verified) for name, source in parts.items() if source is not None}

    @property
    def judged(self) -> str:
        """Split by whose metrics the run is judged: "test" or, without test examples, "train"."""
        return "train" if self.test is None else "test"

    @property
    def stream(self) -> Stream | None:
        """Stream of the training examples; None if they have indices."""
        return self.train.data if isinstance(self.train, StreamSource) else None

    def place_of_nan(self) -> str | None:
        """Describe the first NaN among examples in memory; those of other sources are checked as they are read."""
        for source in (self.train, self.test):
            if source is None or source.checked:
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
    test_data = program.get("test_data")
    test = None if test_data is None else _checked(_source(program, "test_data", test_data(), config))
    data = program.get("train_data")()
    make = _stream if is_stream(data) else _source
    if make is _source and config.steps_per_epoch is not None:
        what = f"is for streams, and {program.name}: train_data() has a length"
        raise InputError(f"{typed('steps_per_epoch', config.steps_per_epoch)}: {what}")
    train = make(program, "train_data", data, config, program.get("augment"))
    return RunData(_checked(train), test, config.verify_data)


def _source(program: Program, function: str, data: Any, config: TrainerConfig, augment: Any = None) -> Source:
    where = f"{program.name}: {function}()"
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


def _stream(program: Program, function: str, data: Any, config: TrainerConfig, augment: Any) -> Source:
    where = f"{program.name}: {function}()"
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
        Stream(program.get(function), config.steps_per_epoch, config.global_batch_size, where, data),
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
