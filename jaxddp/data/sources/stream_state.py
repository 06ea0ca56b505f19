"""What a stream's `state_dict` returns, as JSON: numbers, text, lists, tuples, dictionaries and NumPy's arrays.

Nothing of it can run code when it is read.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxddp.errors import InputError

TUPLE, PAIRS, ARRAY = "(tuple)", "(pairs)", "(array)"  # mark, as the only key of a dictionary, what JSON does not have
PLAIN = (str, int, float, type(None))  # a bool is an int


def to_json(value: Any, where: str) -> Any:
    """Return a value as JSON; `from_json` is the inverse.

    Raises:
        InputError: it holds an object of another type.

    >>> from_json(to_json({"at": (3, None), 0: np.arange(2)}, "state_dict()"))
    {'at': (3, None), 0: array([0, 1])}
    >>> to_json({"at": {1}}, "state_dict()")
    Traceback (most recent call last):
    jaxddp.errors.InputError: state_dict()['at']: is of type set; must be numbers, text, lists, tuples, dicts or arrays
    """
    if type(value) in (*PLAIN, bool):
        return value
    if isinstance(value, list):
        return [to_json(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if type(value) is tuple:
        return {TUPLE: to_json(list(value), where)}
    if isinstance(value, Mapping):
        entries = [(name, to_json(x, f"{where}[{name!r}]")) for name, x in value.items()]
        names = [name for name, _ in entries]
        if all(isinstance(name, str) for name in names) and {TUPLE, PAIRS, ARRAY}.isdisjoint(names):
            return dict(entries)
        return {PAIRS: [[to_json(name, f"{where}: a key"), x] for name, x in entries]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        return {ARRAY: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
    raise InputError(
        f"{where}: is of type {type(value).__name__}; must be numbers, text, lists, tuples, dicts or arrays"
    )


def from_json(value: Any) -> Any:
    """Return the value of which `to_json` made this; a number of NumPy's becomes an array without axes."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(from_json(value[TUPLE]))
    if value.keys() == {PAIRS}:
        return {from_json(name): from_json(x) for name, x in value[PAIRS]}
    if value.keys() == {ARRAY}:
        kind, shape, text = value[ARRAY]
        return np.frombuffer(base64.b64decode(text), np.dtype(kind)).reshape(shape).copy()
    return {name: from_json(x) for name, x in value.items()}
