"""Flatten the batches of a port to dictionaries of arrays, and back. Imports neither framework."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np

from jaxddp.errors import InputError

WITHIN, NONE = " > ", " is None"  # mark nested entries and None in the names of a flat batch


def to_arrays(batch: Any, call: str) -> dict[str, np.ndarray]:
    """Flatten a batch to a dictionary of arrays; `from_arrays` is the inverse.

    Text and other entries without numbers are left out.

    Args:
        batch: dictionary of arrays, tensors of torch or jax, lists of numbers, None, or such dictionaries.
        call: the call that returned the batch, for messages.

    Raises:
        InputError: the batch is not such a dictionary, holds no numbers, or holds arrays of different lengths.

    >>> arrays = to_arrays({"text": ["one", "two"], "ids": {"left": [[1, 2], [3, 4]]}, "mask": None}, "batch(0, 0)")
    >>> {name: array.shape for name, array in arrays.items()}
    {'ids > left': (2, 2), 'mask is None': (2, 0)}
    >>> from_arrays({name: array.tolist() for name, array in arrays.items()})
    {'ids': {'left': [[1, 2], [3, 4]]}, 'mask': None}
    """
    if not isinstance(batch, Mapping) or not batch:
        raise InputError(f"{call}: must be a dictionary of arrays, and is {type(batch).__name__}")
    leaves = _leaves(batch, call)
    arrays = {name: array for name, array in leaves.items() if array is not None and array.dtype.kind in "fiub"}
    if not arrays:
        kinds = ", ".join(f"{name} of {'None' if x is None else x.dtype}" for name, x in leaves.items())
        raise InputError(f"{call}: must hold numbers, and has {kinds or 'nothing'}")
    if numbers := [name for name, array in arrays.items() if not array.ndim]:
        raise InputError(f"{call}: {numbers[0]}: must be an array with an entry for each example, and is one number")
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InputError(f"{call}: its arrays must have the same length, at least 1, and have {sizes}")
    size = next(iter(sizes.values()))
    empty = {f"{name}{NONE}": np.zeros((size, 0), np.uint8) for name, array in leaves.items() if array is None}
    return arrays | empty


def are_equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether two flat batches hold the same values; NaN equals NaN.

    >>> are_equal({"x": np.array([1.0, np.nan])}, {"x": np.array([1.0, np.nan])}), are_equal({"x": np.ones(2)}, {})
    (True, False)
    """
    return one.keys() == other.keys() and all(
        np.array_equal(x, other[name], equal_nan=x.dtype.kind == "f") for name, x in one.items()
    )


def from_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild a batch, with nested dictionaries and None, from a flat dictionary."""
    batch: dict[str, Any] = {}
    for name, value in arrays.items():
        *outer, last = name.removesuffix(NONE).split(WITHIN)
        inner = batch
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = None if name.endswith(NONE) else value
    return batch


def of_batches(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a loss whose last argument is a batch of the port to take a flat batch."""

    @wraps(loss)
    def of_arrays(*arguments: Any) -> Any:
        return loss(*arguments[:-1], from_arrays(arguments[-1]))

    return of_arrays


def _leaves(batch: Mapping[Any, Any], call: str, outer: str = "") -> dict[str, np.ndarray | None]:
    leaves: dict[str, np.ndarray | None] = {}
    for key, value in batch.items():
        name = f"{outer}{key}"
        if isinstance(value, Mapping):
            leaves |= _leaves(value, call, f"{name}{WITHIN}")
        else:
            leaves[name] = None if value is None else _array(value, f"{call}: {name}")
    return leaves


def _array(value: Any, name: str) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor of torch, which may be on a GPU
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name}: must be an array, and is a list of items of several lengths; pad them") from None
    if str(array.dtype) == "bfloat16":
        return array.astype(np.float32)
    return array.astype(np.int64) if _wraps_around(array) else array


def _wraps_around(array: np.ndarray) -> bool:
    """Return whether an array holds small integers, which become int64 for torch; images of uint8 stay uint8."""
    is_image = array.dtype == np.uint8 and array.ndim > 2
    return array.dtype.kind in "iu" and array.dtype.itemsize < 4 and not is_image
