"""Conversion of files of weights from one framework's names and layouts to the other's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from jaxddp.errors import InputError, check_name, differences, listed, reason
from jaxddp.files import write_atomically
from jaxddp.nn.any_model import functional_of
from jaxddp.parity.convert.converter import Arrays, Converter, under_all_names
from jaxddp.parity.port import Port
from jaxddp.parity.records import COUNTER

FRAMEWORKS = ("jax", "torch")
FORMAT = {"jax": "flax", "torch": "pt"}  # names of the frameworks in the metadata of safetensors files


@dataclass(frozen=True)
class ModelPair:
    """Arrays of a port's two models and the converter between them.

    Attributes:
        jax: the jax model's parameters and buffers by name.
        torch: the torch module's state_dict.
        converter: converter between the two.
        no_twin: names of constants that one of them lacks; they keep the model's values.
    """

    jax: Mapping[str, Any]
    torch: Mapping[str, Any]
    converter: Converter
    no_twin: Collection[str] = ()

    @classmethod
    def of_port(cls, port: Port) -> "ModelPair":
        """Build both models of a port.

        Raises:
            InputError: the model is not a jax model, or its arrays do not map to torch's.
        """
        batch = partial(port.first_batch, "jax")
        functional = functional_of(port.jax_model(), port.jax_loss, batch, port.no_twin)
        module = port.torch_model().cpu()
        converter = Converter(module, functional.shapes, port.names, port.transpose_kernel, port.no_twin)
        arrays = functional.params | functional.buffers
        jax = {name: array for name, array in arrays.items() if name in functional.shapes}
        return cls(jax, module.state_dict(), converter, port.no_twin)

    def other_side(self, names: set[str]) -> str:
        """Return the framework that these names do not belong to.

        Raises:
            InputError: as many names belong to one framework as to the other.
        """
        count = {"jax": len(names & self.jax.keys()), "torch": len(names & self.torch.keys())}
        if not any(count.values()):
            raise InputError(f"has names of neither model ({listed(sorted(names))})")
        if count["jax"] == count["torch"]:
            raise InputError(f"{count['jax']} of its names are jax's, and as many are torch's; give --to")
        return "jax" if count["torch"] > count["jax"] else "torch"

    def translated(self, arrays: Arrays, to: str) -> dict[str, np.ndarray]:
        """Convert all weights of one model to all weights of the other; floating-point dtypes stay.

        Args:
            arrays: torch's state_dict, or jax's arrays; torch's tied tensors under one or all of their names.
            to: "jax" or "torch".

        Raises:
            InputError: lists all arrays that are missing, left over, or of another shape or kind, and all that are
                tied in torch and differ here.
        """
        check_name("--to", to, FRAMEWORKS)
        if to == "jax":
            tensors = under_all_names(arrays, self.converter.tied)
            mapped = {piece.torch for piece in self.converter.pieces}  # without the counters, which jax does not have
            wanted = {name: tensor for name, tensor in self.torch.items() if name in tensors or name in mapped}
            self._check(tensors, wanted, tensors)
            constants = {name: np.asarray(x) for name, x in self.jax.items() if name in self.no_twin}
            converted = {name: np.array(x) for name, x in self.converter.to_jax(tensors).items()}  # no views
            return _integers_as(self.jax, constants | converted)
        self._check(arrays, self.jax, {})
        tensors = self.converter.to_torch(arrays)
        self._check({}, {}, tensors)
        kept = {name for name in self.torch if (_is_counter(name) or name in self.no_twin) and name not in tensors}
        return _integers_as(self.torch, {**{name: self.torch[name].numpy() for name in kept}, **tensors})

    def _check(self, given: Arrays, wanted: Mapping[str, Any], tensors: Arrays) -> None:
        """Raise unless `given` has the names, shapes and kinds that are wanted, and tied `tensors` are equal."""
        problems = differences(given, wanted)
        problems += [
            f"{name} is {given[name].dtype} and not {wanted[name].dtype}"
            for name in sorted(given.keys() & wanted.keys())
            if _is_integer(given[name]) != _is_integer(wanted[name])
        ]
        problems += [
            f"{name} differs from {first}, which is the same tensor in torch"
            for name, first in self.converter.tied.items()
            if name in tensors and tensors[name].tobytes() != tensors[first].tobytes()
        ]
        if problems:
            raise InputError(f"does not fit the model: {'; '.join(problems)}")


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .safetensors file by name, in the file's dtypes (bfloat16 too).

    Raises:
        InputError: the file is missing or is not a safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({reason(error)})") from error


def write(path: Path, arrays: Arrays, framework: str) -> None:
    """Write a .safetensors file atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "weights.safetensors"), {"fc.weight": np.arange(6.0).reshape(3, 2).T}, "torch")
    ...     print(read(Path(folder, "weights.safetensors"))["fc.weight"])
    [[0. 2. 4.]
     [1. 3. 5.]]
    """
    in_rows = {name: np.array(array, order="C") for name, array in arrays.items()}  # safetensors ignores strides
    write_atomically(path, save(in_rows, metadata={"format": FORMAT[framework]}))


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _is_integer(array: Any) -> bool:
    """Return whether an array of numpy, jax or torch holds integers; NumPy has no `kind` for bfloat16."""
    return str(array.dtype).removeprefix("torch.").startswith(("int", "uint", "bool"))


def _integers_as(model: Mapping[str, Any], arrays: Arrays) -> dict[str, np.ndarray]:
    """Cast integers, such as counters, to the model's dtype: torch's are int64, jax's int32."""
    return {name: x.astype(np.asarray(model[name]).dtype) if _is_integer(x) else x for name, x in arrays.items()}
