"""Checks of .safetensors files and of the values read from them, for both trainers."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jaxddp.errors import InputError, differences, listed, reason
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
        InputError: the path is not a regular file or not a safetensors file, or it holds types that NumPy lacks.
    """
    check_regular(f"{option} {path}", Path(path))
    try:
        with safe_open(path, "np") as file:
            types = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{option} {path}: not a readable safetensors file ({reason(error)})") from None
    for name, kind in sorted(types.items()):
        if kind not in FLOATS | INTEGERS and kind not in OTHERS:
            raise InputError(f"{option} {path}: {name} is {kind}; must be {_any_of(FLOATS)}")
    return types


def fitted(tensors: Mapping[str, Any], expected: Mapping[str, Any], where: str, lines: list[str]) -> dict[str, Any]:
    """Return the model's tensors with those of a file in place of the ones that fit by name and shape.

    Args:
        tensors, expected: those of the file and of the model, by the same names.
        where: flag and file, for the line that is added to `lines`: what is left out on either side.

    Raises:
        InputError: nothing fits.

    >>> lines: list[str] = []
    >>> fitted({"a": np.ones(1), "c": np.ones(1)}, {"a": np.zeros(1), "b": np.zeros(2)}, "--weights-partial f", lines)
    {'a': array([1.]), 'b': array([0., 0.])}
    >>> lines
    ["--weights-partial f: loads 1 of the model's 2 tensors; left over c; missing b"]
    """
    problems = differences(tensors, expected)
    fitting = {n: x for n, x in tensors.items() if n in expected and tuple(x.shape) == tuple(expected[n].shape)}
    if not fitting:
        raise InputError(f"nothing in it fits the model: {listed(problems)}")
    lines.append("; ".join([f"{where}: loads {len(fitting)} of the model's {len(expected)} tensors", *problems]))
    return {**expected, **fitting}


def check_types(types: Mapping[str, str], is_float: Mapping[str, bool]) -> None:
    """Raise `InputError` unless each tensor of a file has a type that fits the model.

    Args:
        types: types of the tensors in the file, from `read_types`.
        is_float: whether the model's tensors have floating-point numbers, by name.

    >>> check_types({"fc.weight": "U8"}, {"fc.weight": True})
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: fc.weight is U8; must be float64, float32, float16 or bfloat16
    """
    for name, kind in sorted(types.items()):
        taken = FLOATS if is_float.get(name, True) else INTEGERS
        if name in is_float and kind not in taken:
            raise InputError(f"{name} is {(FLOATS | INTEGERS).get(kind, kind)}; must be {_any_of(taken)}")


def check_values(tensors: Mapping[str, Any], values: Mapping[str, NDArray[Any]], buffers: Collection[str] = ()) -> None:
    """Raise `InputError` unless the model's types can hold the values of a file.

    Args:
        tensors: tensors of the file, as arrays of NumPy or torch.
        values: the same tensors, by the same names, in the types of the model.
        buffers: names of those that are no parameters, and may be infinite in the file, as a mask of -inf.

    >>> check_values({"fc.bias": np.array([1, 1e300])}, {"fc.bias": np.float32([1, np.inf])})
    Traceback (most recent call last):
    ...
    jaxddp.errors.InputError: fc.bias[1] is 1e+300; must be finite in float32
    """
    for name, value in sorted(values.items()):
        is_float, given = value.dtype.kind == "f", tensors[name]
        wrong = ~np.isfinite(value) if is_float else value != np.asarray(given)
        if name in buffers:
            wrong &= np.asarray(abs(given) != math.inf)
        if wrong.any():
            index = tuple(map(int, np.argwhere(wrong)[0]))
            limit = f"finite in {value.dtype}" if is_float else "in int32"
            raise InputError(f"{name}{list(index) or ''} is {tensors[name][index].item()}; must be {limit}")


def _any_of(types: Mapping[str, str]) -> str:
    *some, last = types.values()
    return f"{', '.join(some)} or {last}"
