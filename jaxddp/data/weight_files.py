"""Checks of .safetensors files and of the values read from them, for both trainers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jaxddp.errors import InputError
from jaxddp.files import check_regular

# Name of a dtype in the file -> name for the user. Floating-point numbers are cast to the type of the model.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = {"I64": "int64", "I32": "int32"}  # counters
OTHERS = {"I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"}  # can be read, and fit no tensor of the trainers


def read_types(path: str | Path, option: str) -> dict[str, str]:
    """Return the type of each tensor in a file, by torch's names, without reading the tensors.

    Args:
        path: .safetensors file.
        option: flag that error messages name.

    Raises:
        InputError: the path is no regular file, no safetensors file, or holds types that NumPy lacks.
    """
    check_regular(f"{option} {path}", Path(path))
    try:
        with safe_open(path, "np") as file:
            types = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{option} {path}: not a readable safetensors file ({error})") from None
    for name, kind in sorted(types.items()):
        if kind not in FLOATS | INTEGERS and kind not in OTHERS:
            raise InputError(f"{option} {path}: {name} is {kind}; must be {_any_of(FLOATS)}")
    return types


def check_values(types: Mapping[str, str], values: Mapping[str, NDArray[Any]]) -> None:
    """Raise unless each tensor of a file has a type that fits the model, and finite values.

    Args:
        types: types of the tensors in the file, from `read_types`.
        values: the same tensors, by the same names, in the types of the model.

    Raises:
        InputError: a type or a value does not fit; the message names the tensor.

    >>> check_values({"fc.weight": "U8"}, {"fc.weight": np.ones((2, 1), np.float32)})
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: fc.weight is U8; must be float64, float32, float16 or bfloat16
    """
    for name, value in sorted(values.items()):
        taken = FLOATS if value.dtype.kind == "f" else INTEGERS
        if types[name] not in taken:
            raise InputError(f"{name} is {(FLOATS | INTEGERS).get(types[name], types[name])}; must be {_any_of(taken)}")
        wrong = np.argwhere(~np.isfinite(value))
        if wrong.size:
            index = tuple(wrong[0])
            raise InputError(f"{name}{list(map(int, index))} is {value[index]}; must be finite in {value.dtype}")


def _any_of(types: Mapping[str, str]) -> str:
    *some, last = types.values()
    return f"{', '.join(some)} or {last}"
