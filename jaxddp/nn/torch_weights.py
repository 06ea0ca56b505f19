"""Weights under torch's names and in torch's layout, which both frameworks read and write.

The parameters and buffers of a flax model correspond to a torch state_dict of NumPy arrays:

    kernel (in, out)                 weight (out, in)                    Linear
    kernel (*size, in / groups, out) weight (out, in / groups, *size)    Conv
    embedding (num, features)        weight (num, features)              Embedding
    scale, mean, var                 weight, running_mean, running_var   BatchNorm
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax import numpy as jnp
from safetensors.numpy import load_file, save

from jaxddp.config.name_patterns import frozen_names, matching
from jaxddp.data.weight_files import check_types, check_values, fitted, read_types
from jaxddp.errors import InputError, differences
from jaxddp.files import write_atomically
from jaxddp.state import Buffers, Params
from jaxddp.torch_layout import from_torch_layout, to_torch_layout, torch_name

Convert = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def frozen_params(patterns: Iterable[str], params: Iterable[str]) -> tuple[str, ...]:
    """Return the flax names of the parameters whose torch names match a pattern of `--freeze`.

    Raises:
        InputError: a pattern matches no parameter, or the patterns match all parameters.

    >>> frozen_params(["*.weight"], ["fc.bias", "fc.kernel"])
    ('fc.kernel',)
    """
    names = {torch_name(name): name for name in params}
    return tuple(names[name] for name in frozen_names("--freeze", patterns, names))


def named_params(option: str, patterns: Iterable[str], params: Iterable[str]) -> tuple[str, ...]:
    """Return the flax names of the parameters whose torch names match a pattern of `option`.

    Raises:
        InputError: a pattern matches no parameter.
    """
    names = {torch_name(name): name for name in params}
    return tuple(names[name] for name in matching(option, patterns, names))


def to_torch(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, np.ndarray]:
    """Convert flax parameters or buffers to a torch state_dict of NumPy arrays; counters become int64.

    >>> to_torch({"fc.kernel": np.zeros((3, 2))})["fc.weight"].shape
    (2, 3)
    """
    tensors = {}
    for name, array in arrays.items():
        value = np.asarray(array)
        dtype = np.int64 if value.dtype.kind == "i" else value.dtype
        tensors[torch_name(name)] = np.array(to_torch_layout(name, value), dtype=dtype, order="C")
    return tensors


def from_torch(tensors: Mapping[str, np.ndarray], params: Params, buffers: Buffers) -> tuple[Params, Buffers]:
    """Convert a torch state_dict to flax parameters and buffers.

    Args:
        tensors: arrays in torch's layout, by torch's names.
        params, buffers: those of the flax model, for their names, shapes and dtypes.

    Raises:
        InputError: tensors are missing, left over, or of another shape; the message lists all of them.

    >>> params, buffers = from_torch({"fc.weight": np.array([[1.0, 2.0]])}, {"fc.kernel": jnp.zeros((2, 1))}, {})
    >>> params["fc.kernel"].tolist()
    [[1.0], [2.0]]
    """
    if problems := differences(tensors, to_torch({**params, **buffers})):
        raise InputError(f"weights do not fit the model: {'; '.join(problems)}")

    def convert(like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        # Copied first: jax may share an array's memory, and torch changes its tensors in place.
        return {
            name: jnp.asarray(np.array(from_torch_layout(name, tensors[torch_name(name)]), value.dtype))
            for name, value in like.items()
        }

    return convert(params), convert(buffers)


def save_weights(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a .safetensors file that torch_ref, or any torch model with these names, can load.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(f"{folder}/model.safetensors", to_torch({"fc.kernel": jnp.zeros((2, 1))}))
    ...     {name: tensor.shape for name, tensor in load_weights(f"{folder}/model.safetensors").items()}
    {'fc.weight': (1, 2)}
    """
    write_atomically(Path(path), save(dict(tensors)))


def load_weights(path: str | Path, option: str = "--weights") -> dict[str, np.ndarray]:
    """Read a .safetensors file; return its arrays by torch's names.

    Args:
        path: file to read.
        option: flag that error messages name.

    Raises:
        InputError: the file is missing, not a safetensors file, or holds types that NumPy lacks.
    """
    read_types(path, option)  # which checks the file
    return load_file(path)


def start_values(
    path: str | Path, params: Params, buffers: Buffers, convert: Convert | None = None, lines: list[str] | None = None
) -> tuple[Params, Buffers]:
    """Read the values with which training starts from a .safetensors file.

    Args:
        path: value of --weights or --weights-partial; its names are torch's, or the model's own.
        params, buffers: those of the model, for their names, shapes and dtypes.
        convert: makes the model's arrays, or some of them, of tensors that have neither names; None: they are refused.
        lines: with --weights-partial, gets a line on what is left out; None: nothing may be.

    Raises:
        InputError: as `load_weights` and `from_torch`; or a tensor has another type, or values that are not finite.
    """
    option = "--weights" if lines is None else "--weights-partial"
    types, tensors = read_types(path, option), load_file(path)
    like = {**params, **buffers}
    of_torch = {torch_name(name) for name in like}
    try:
        if lines is not None:
            own = {name: np.asarray(value) for name, value in like.items()}
            known = max(to_torch(like), own, key=lambda names: len(names.keys() & tensors.keys()))
            if convert is not None and 2 * len(known.keys() & tensors.keys()) <= len(tensors):
                tensors, types = own | convert(tensors), {}
            else:
                tensors = fitted(tensors, known, f"{option} {path}", lines)
        elif convert is not None and tensors.keys() not in (of_torch, like.keys()):
            with contextlib.suppress(InputError):  # the names are of neither side, and are listed below
                own = {name: np.asarray(value) for name, value in buffers.items()}  # a counter may have no twin
                tensors, types = own | convert(tensors), {}
        if tensors.keys() == like.keys() != of_torch:
            return _own_values(types, tensors, params, buffers)
        check_types(types, {torch_name(name): x.dtype.kind == "f" for name, x in like.items()})
        with np.errstate(over="ignore"):  # an overflow gets a message with the tensor's name
            values = from_torch(tensors, params, buffers)
        check_values(tensors, to_torch(values[0] | values[1]), {torch_name(name) for name in buffers})
    except InputError as error:
        raise InputError(f"{option} {path}: {error}") from None
    return values


def _own_values(
    types: Mapping[str, str], tensors: Mapping[str, np.ndarray], params: Params, buffers: Buffers
) -> tuple[Params, Buffers]:
    """Return the arrays of a file by the model's names, in the model's layouts."""
    like = {**params, **buffers}
    if problems := differences(tensors, like):
        raise InputError(f"weights do not fit the model: {'; '.join(problems)}")
    check_types(types, {name: x.dtype.kind == "f" for name, x in like.items()})
    with np.errstate(over="ignore"):
        arrays = {name: np.array(tensors[name], x.dtype) for name, x in like.items()}
    check_values(tensors, arrays, buffers)
    return {name: jnp.asarray(arrays[name]) for name in params}, {name: jnp.asarray(arrays[name]) for name in buffers}
