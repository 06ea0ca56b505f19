"""Weights under torch's names in .safetensors files, which jaxddp also reads and writes."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from jaxddp.data.weight_files import check_types, check_values, fitted, read_types
from jaxddp.errors import InputError, differences
from jaxddp.files import write_atomically
from jaxddp.program import Program


def save_weights(path: Path, module: nn.Module) -> None:
    """Write a module's state_dict to a .safetensors file that jaxddp can load."""
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in module.state_dict().items()}))


def arrays_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of a module's state_dict as NumPy arrays."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def load_weights(
    path: str | Path, module: nn.Module, program: Program | None = None, lines: list[str] | None = None
) -> None:
    """Load a .safetensors file into a module, in the module's dtype.

    Args:
        program: if its JAX model has other names, a file with these is converted; None: it is refused.
        lines: with --weights-partial, gets a line on what is left out, by torch's names; None: nothing may be.

    Raises:
        InputError: the file is missing, or not a safetensors file; or tensors are missing, left over, or of another
            shape, and the message lists all of them; or a tensor has another type, or values that are not finite.
    """
    option = "--weights" if lines is None else "--weights-partial"
    types, tensors = read_types(path, option), load_file(path)
    convert = lines is None and program is not None and program.get("jax_model")
    if program is not None and convert and tensors.keys() - module.state_dict().keys():
        tensors = _of_twin(tensors, module, program)
    try:
        if lines is not None:
            tensors = fitted(tensors, module.state_dict(), f"{option} {path}", lines)
        if problems := differences(tensors, module.state_dict()):
            raise InputError(f"does not fit the model: {'; '.join(problems)}")
        check_types(types, {name: tensor.is_floating_point() for name, tensor in module.state_dict().items()})
        module.load_state_dict(tensors)
        values = {name: tensor.cpu().numpy() for name, tensor in module.state_dict().items()}
        check_values(tensors, values, values.keys() - dict(module.named_parameters()).keys())
    except InputError as error:
        raise InputError(f"{option} {path}: {error}") from None


def _of_twin(tensors: dict[str, Tensor], module: nn.Module, program: Program) -> dict[str, Tensor]:
    """Convert the arrays of the program's JAX model, and add what it lacks; return other tensors unchanged."""
    from jaxddp.parity.convert.twin_files import to_torch

    try:
        arrays = to_torch({name: tensor.numpy() for name, tensor in tensors.items()}, program, module)
    except InputError:
        return tensors  # neither side's, which the caller reports
    kept = (*program.get("no_twin", ()), "num_batches_tracked")
    constants = {n: x for n, x in module.state_dict().items() if n in kept or n.rpartition(".")[2] in kept}
    return constants | {name: torch.from_numpy(array) for name, array in arrays.items()}
