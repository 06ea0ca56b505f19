"""Batches of an evaluation, and what a side computes of them. Imports neither framework."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxddp.data.batches import to_arrays
from jaxddp.data.sources import Source, as_source
from jaxddp.errors import InputError
from jaxddp.parity.port.draws import examples_of
from jaxddp.parity.port.port import Port, Side
from jaxddp.scripts import errors_located

PREDICT = "predict"
BATCHES = 2  # full batches of an evaluation, before a shorter one
ELEMENTS = 2**23  # of an output of a batch; of a larger one, some are compared

Arrays = dict[str, np.ndarray]


class NotComparableError(InputError):
    """What a side computes in evaluation cannot be the same on both sides."""


@dataclass(frozen=True)
class EvaluationBatch:
    """A batch of an evaluation.

    Attributes:
        arrays: examples, (B, ...).
        size: B.
        test_set: beginning of the outputs' names: "" of the only test set, "noisy_" of several.
        filled: number of examples to which jax's trainer fills up the batch; 0: the trainers do not evaluate the port.
        has_losses: the sums include those of the losses, as in the trainers, or where the port has no evaluation.
        digest: of test data, which both sides load for themselves; "" for examples of the run.
    """

    arrays: Arrays
    size: int
    test_set: str = ""
    filled: int = 0
    has_losses: bool = False
    digest: str = ""


@dataclass(frozen=True)
class Evaluated:
    """What a side computes of a batch.

    Attributes:
        test_set, size, digest: see `EvaluationBatch`.
        outputs: what `predict` returns, array by array.
        sums: sums of losses and metrics, and what to divide them by, as in the trainers.
        padded: the same of the batch as jax's trainer fills it up; {}: it does not.
        depends: whether the outputs depend on the parameters; only jax's side can tell.
        errors: "predict" and "metrics" -> what the side did instead ("raises ...").
    """

    test_set: str
    size: int
    digest: str = ""
    outputs: Arrays = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    padded: dict[str, float] = field(default_factory=dict)
    depends: bool = True
    errors: dict[str, str] = field(default_factory=dict)


@contextmanager
def noted(errors: dict[str, str], part: str, name: str) -> Iterator[None]:
    """Note what the code of a port raises, in place of raising it.

    Args:
        errors, part: see `Evaluated`.
        name: name of the port.
    """
    try:
        with errors_located(name):
            yield
    except NotComparableError as error:
        errors[part] = f"{error}"
    except InputError as error:
        errors[part] = f"raises {error}"


def evaluation_batches(port: Port, side: Side, steps: int) -> list[EvaluationBatch]:
    """Return the batches of a port's evaluation: full ones and a shorter one, of each test set or of the run.

    Args:
        port: the port.
        side: the side to ask, where each has its own loader.
        steps: steps of the run, from which the examples are if the port has no test data.
    """
    if port.test_data is None:
        return [*_of_run(port, side, steps)]
    size, data = _size(examples_of(port.first_batch(side))), port.test_data()
    if isinstance(data, Mapping) and data and all(isinstance(x, Source) for x in data.values()):
        of_sets = ((name, batch) for name, source in data.items() for batch in _of_source(source, size))
        return [replace(batch, test_set=name, has_losses=port.torch_step is None) for name, batch in of_sets]
    return [replace(batch, filled=0) for batch in _of_source(as_source(data, "test_data()"), size)]


def cut(examples: int, size: int) -> tuple[int, int]:
    """Return how many examples to evaluate, and in batches of which size; the rest has no divisor in common with it.

    >>> cut(360, 16), cut(40, 16), cut(5, 16), cut(1, 16)
    ((47, 16), (39, 16), (5, 3), (1, 1))
    """
    size = min(size, examples // 2 + 1)
    count = min(examples, BATCHES * size + size - 1)
    return next(n for n in range(count, 0, -1) if n <= size or math.gcd(n, size) == 1), size


def output_arrays(outputs: Any, name: str = PREDICT) -> dict[str, Any]:
    """Return the arrays among what `predict` returns, by name; they may be of any framework.

    >>> [*output_arrays({"logits": np.zeros(2), "states": (np.ones(1), None)})]
    ['predict.logits', 'predict.states.0']
    """
    if hasattr(outputs, "shape") and hasattr(outputs, "dtype"):
        return {name: outputs}
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    if isinstance(outputs, tuple | list):
        outputs = dict(zip(getattr(outputs, "_fields", range(len(outputs))), outputs, strict=True))
    if not isinstance(outputs, Mapping):
        return {}
    return {key: x for inner, value in outputs.items() for key, x in output_arrays(value, f"{name}.{inner}").items()}


def real(x: np.ndarray) -> np.ndarray:
    """Return an output as float64, integers or booleans; of a complex one, both parts; of a large one, some elements.

    >>> real(np.array([1 + 2j])), real(np.ones(2, np.float32)).dtype
    (array([[1., 2.]]), dtype('float64'))
    """
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag], axis=-1)
    x = x if x.dtype.kind in "iub" else x.astype(np.float64)
    if x.size <= ELEMENTS:
        return x
    rows = x.reshape(len(x), -1)
    return rows[:, :: -(-x.size // ELEMENTS) | 1]


def _of_source(source: Source, size: int) -> Iterator[EvaluationBatch]:
    count, size = cut(len(source), size)
    for first in range(0, count, size):
        indices = np.arange(first, min(first + size, count))
        arrays = to_arrays(source.take(indices, 0), source.where)
        content = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values()))
        yield EvaluationBatch(arrays, len(indices), filled=size, digest=content.hexdigest())


def _of_run(port: Port, side: Side, steps: int) -> Iterator[EvaluationBatch]:
    """Yield batches of the first steps, the last of them cut."""
    has_losses = port.predict is None and port.torch_step is None
    for number in range(BATCHES + 1):
        arrays = examples_of(port.micro_batches(number % steps, 0, side)[0])
        size = _size(arrays)
        size = size if number < BATCHES else max(1, size - 1)
        yield EvaluationBatch({name: x[:size] for name, x in arrays.items()}, size, has_losses=has_losses)


def _size(arrays: Mapping[str, Any]) -> int:
    return len(next(iter(arrays.values())))
