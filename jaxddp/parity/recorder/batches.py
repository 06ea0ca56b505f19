"""Identify the examples of a batch by numbers, whatever their layout and rounding."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxddp.parity.fingerprints import fingerprints, number_of_examples

SKETCHES = 2  # projections of an example's values
PLAIN, SORTED, HASH = "plain", "sorted", "hash"

Entries = dict[str, np.ndarray]


def entries_of(batch: Any) -> Entries:
    """Return the arrays of a batch that have one row per example, by name or place; see `number_of_examples`.

    Args:
        batch: an array or tensor, a mapping, a sequence, or any nesting of these; all else in it is ignored.

    >>> {name: x.shape for name, x in entries_of((np.ones((4, 3)), {"label": np.arange(4)}, "note", 7)).items()}
    {'0': (4, 3), '1.label': (4,)}
    """
    found = {name: x for name, x in _arrays(batch, ()) if x.ndim and x.dtype.kind in "biuf"}
    rows = number_of_examples(found) if found else 0
    return {name: x for name, x in found.items() if len(x) == rows}


def _arrays(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _arrays(item, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and not _is_numbers(value):
        for place, item in enumerate(value):
            yield from _arrays(item, (*path, str(place)))
    elif hasattr(value, "shape") or (isinstance(value, Sequence) and _is_numbers(value)):
        yield ".".join(path) or "batch", to_array(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, int | float) for x in value)


def to_array(value: Any) -> np.ndarray:
    """Return a NumPy array with the values of a tensor or array; bfloat16 becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).cpu().numpy()
    array = np.asarray(value)
    known = array.dtype.kind in "biufSUO" or array.dtype == np.bool_
    return array if known else array.astype(np.float32)  # ml_dtypes' numbers


def identified(micro_batches: Sequence[Entries]) -> dict[str, np.ndarray]:
    """Return the numbers that identify the examples of a replica's micro-batches.

    Returns:
        "entry:hash" -> (B,) uint64, of the exact values; for floating-point entries "entry:plain" and
        "entry:sorted" -> (B, 2) float64, projections of the values as they lie, and of the sorted values, which
        another layout (NCHW, NHWC, flat) does not change. Rounding moves projections only a little.
    """
    if not micro_batches or not micro_batches[0]:
        return {}
    found = {f"{name}:{HASH}": numbers for name, numbers in fingerprints(micro_batches).items()}
    for name, x in micro_batches[0].items():
        if x.dtype.kind == "f" and f"{name}:{HASH}" in found:
            rows = np.concatenate([batch[name] for batch in micro_batches])
            rows = rows.reshape(len(rows), -1).astype(np.float64)
            found[f"{name}:{PLAIN}"] = rows @ _directions(rows.shape[1])
            found[f"{name}:{SORTED}"] = np.sort(rows, axis=1) @ _directions(rows.shape[1])
    return found


def _directions(size: int) -> np.ndarray:
    """Return fixed random directions, (size, SKETCHES), scaled so that a projection is about as large as a value."""
    return np.random.default_rng(1).normal(size=(size, SKETCHES)) / np.sqrt(size)
