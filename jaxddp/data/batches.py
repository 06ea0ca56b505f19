"""Flatten batches and examples to dictionaries of arrays, and back. Imports neither framework."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np

from jaxddp.errors import InputError

WITHIN, NONE = " > ", " is None"  # mark nested entries and None in the names of a flat batch
ENTRY = "({})"  # names an entry of a tuple
TAKES_ARRAYS = "takes_arrays"  # attribute of a function that takes a flat batch


def to_arrays(batch: Any, call: str) -> dict[str, np.ndarray]:
    """Flatten a batch to a dictionary of arrays; `from_arrays` is the inverse.

    Text and other entries without numbers are left out.

    Args:
        batch: dictionary or tuple of arrays, tensors of torch or jax, lists of numbers, None, or such dictionaries
            and tuples. A list of arrays counts as a tuple.
        call: the call that returned the batch, for messages.

    Raises:
        InputError: the batch is no dictionary or tuple, holds no numbers, or holds arrays of different lengths.

    >>> arrays = to_arrays({"text": ["one", "two"], "ids": {"left": [[1, 2], [3, 4]]}, "mask": None}, "batch(0, 0)")
    >>> {name: array.shape for name, array in arrays.items()}
    {'ids > left': (2, 2), 'mask is None': (2, 0)}
    >>> from_arrays({name: array.tolist() for name, array in arrays.items()})
    {'ids': {'left': [[1, 2], [3, 4]]}, 'mask': None}
    >>> list(to_arrays((np.ones(2), {"y": np.ones(2)}), "batch(0, 0)"))
    ['(0)', '(1) > y']
    """
    leaves = _leaves(batch, call)
    arrays = _numbers(leaves, call)
    if numbers := [name for name, array in arrays.items() if not array.ndim]:
        raise InputError(f"{call}: {numbers[0]}: must be an array with an entry for each example, and is one number")
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise InputError(f"{call}: its arrays must have the same length, at least 1, and have {sizes}")
    size = next(iter(sizes.values()))
    return arrays | {f"{name}{NONE}": np.zeros((size, 0), np.uint8) for name, x in leaves.items() if x is None}


def example_arrays(example: Any, where: str) -> dict[str, np.ndarray]:
    """Flatten one example as `to_arrays` flattens a batch of them; its entries may be single numbers.

    Integers keep their type, and a list is an array.

    Raises:
        InputError: the example is no dictionary or tuple, or holds no numbers.

    >>> example_arrays((np.zeros(3), 7), "train_data[0]")
    {'(0)': array([0., 0., 0.]), '(1)': array(7)}
    """
    leaves = _leaves(example, where, of_example=True)
    return _numbers(leaves, where) | {f"{name}{NONE}": np.zeros(0, np.uint8) for name, x in leaves.items() if x is None}


def are_equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether two flat batches hold the same values; NaN equals NaN.

    >>> are_equal({"x": np.array([1.0, np.nan])}, {"x": np.array([1.0, np.nan])}), are_equal({"x": np.ones(2)}, {})
    (True, False)
    """
    return one.keys() == other.keys() and all(
        np.array_equal(x, other[name], equal_nan=x.dtype.kind == "f") for name, x in one.items()
    )


def copied(example: Any) -> Any:
    """Return a nested example with copies of its arrays and tensors; other objects are the same.

    >>> example = {"x": (np.ones(2), "text")}
    >>> copied(example)["x"][0] is example["x"][0]
    False
    """
    if type(example) in (dict, list, tuple):
        parts = {name: copied(x) for name, x in example.items()} if type(example) is dict else map(copied, example)
        return type(example)(parts)
    if isinstance(example, np.ndarray):
        return example.copy()
    return example.clone() if hasattr(example, "detach") else example


def from_arrays(arrays: Mapping[str, Any]) -> Any:
    """Rebuild a batch or an example, with nested dictionaries, tuples and None, from a flat dictionary.

    >>> from_arrays({"(0)": 1, "(1) > left": 2, "(1) > right is None": 3})
    (1, {'left': 2, 'right': None})
    >>> from_arrays({f"({i})": i for i in (0, 1, 10, *range(2, 10))})
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    """
    batch: dict[str, Any] = {}
    for name, value in arrays.items():
        *outer, last = name.removesuffix(NONE).split(WITHIN)
        inner = batch
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = None if name.endswith(NONE) else value
    return _with_tuples(batch)


def _with_tuples(batch: Any) -> Any:
    """Turn dictionaries whose keys are entries of a tuple, of which those without numbers are missing, into tuples."""
    if not isinstance(batch, dict):
        return batch
    inner = {name: _with_tuples(value) for name, value in batch.items()}
    if not inner or not all(re.fullmatch(r"\(\d+\)", name) for name in inner):
        return inner
    return tuple(inner[name] for name in sorted(inner, key=lambda name: int(name[1:-1])))  # jax sorts them as text


def of_batches(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a loss whose last argument is a batch of the port to take a flat batch; return one that does as it is.

    Raises:
        TypeError: when it is called, if the loss does not take the batch as one argument.

    >>> first = of_batches(lambda batch: batch[0])
    >>> first({"(0)": 1, "(1)": 2}), of_batches(first) is first
    (1, True)
    """
    if getattr(loss, TAKES_ARRAYS, False):
        return loss

    @wraps(loss)
    def of_arrays(*arguments: Any, **named: Any) -> Any:
        given = (*arguments[:-1], from_arrays(arguments[-1]))
        try:
            takes.bind(*given, **named)
        except TypeError as error:
            called = f"{getattr(loss, '__name__', 'the function')}{takes}"
            raise TypeError(f"{called}: {error}; the batch is one argument, the last") from None
        return loss(*given, **named)

    takes = signature(loss)
    setattr(of_arrays, TAKES_ARRAYS, True)  # functions that wrap it further have it too
    return of_arrays


def _leaves(batch: Any, call: str, of_example: bool = False) -> dict[str, np.ndarray | None]:
    """Return the arrays of a nested batch or example by name, None for None."""
    leaves: dict[str, np.ndarray | None] = {}

    def add(entries: Iterable[tuple[Any, Any]], outer: str) -> None:
        for key, value in entries:
            name = f"{outer}{key}"
            if (inner := _entries(value, of_example)) is not None:
                add(inner, f"{name}{WITHIN}")
            else:
                leaves[name] = None if value is None else _array(value, f"{call}: {name}", not of_example)

    entries = _entries(batch, of_example)
    if not entries:
        raise InputError(f"{call}: must be a dictionary or tuple of arrays, and is {type(batch).__name__}")
    add(entries, "")
    return leaves


def _entries(value: Any, of_example: bool) -> list[tuple[Any, Any]] | None:
    """Return the names and values of a dictionary or tuple; None for a leaf, as a batch's tuple of numbers is."""
    if isinstance(value, Mapping):
        return list(value.items())
    if not isinstance(value, tuple | list):
        return None
    nested = any(isinstance(x, Mapping | tuple) or getattr(x, "ndim", 0) for x in value)
    return (
        [(ENTRY.format(i), x) for i, x in enumerate(value)] if nested or (of_example and type(value) is tuple) else None
    )


def _numbers(leaves: Mapping[str, np.ndarray | None], call: str) -> dict[str, np.ndarray]:
    arrays = {name: array for name, array in leaves.items() if array is not None and array.dtype.kind in "fiub"}
    if not arrays:
        kinds = ", ".join(f"{name} of {'None' if x is None else x.dtype}" for name, x in leaves.items())
        raise InputError(f"{call}: must hold numbers, and has {kinds or 'nothing'}")
    return arrays


def _array(value: Any, name: str, widen: bool = True) -> np.ndarray:
    """Return a leaf as an array; `widen` turns small integers into int64."""
    if hasattr(value, "detach"):  # a tensor of torch, which may be on a GPU
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name}: must be an array, and is a list of items of several lengths; pad them") from None
    if str(array.dtype) == "bfloat16":
        return array.astype(np.float32)
    return widened(array) if widen else array


def widened(array: np.ndarray) -> np.ndarray:
    """Return small integers of a batch as int64, since a sum in them would wrap around; images of uint8 stay uint8."""
    is_image = array.dtype == np.uint8 and array.ndim > 2
    small = array.dtype.kind in "iu" and array.dtype.itemsize < 4 and not is_image
    return array.astype(np.int64) if small else array
