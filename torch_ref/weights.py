"""Weights under torch's names in .safetensors files, which jaxddp also reads and writes."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from jaxddp.data.weight_files import check_types, check_values, read_types
from jaxddp.errors import InputError, differences
from jaxddp.files import write_atomically


def save_weights(path: Path, module: nn.Module) -> None:
    """Write a module's state_dict to a .safetensors file that jaxddp can load."""
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in module.state_dict().items()}))


def load_weights(path: str | Path, module: nn.Module) -> None:
    """Load a .safetensors file into a module, in the module's dtype.

    Raises:
        InputError: the file is missing, or not a safetensors file; or tensors are missing, left over, or of another
            shape, and the message lists all of them; or a tensor has another type, or values that are not finite.
    """
    types = read_types(path, "--weights")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--weights {path}: not a readable safetensors file ({error})") from None
    if problems := differences(tensors, module.state_dict()):
        raise InputError(f"--weights {path}: does not fit the model: {'; '.join(problems)}")
    try:
        check_types(types, {name: tensor.is_floating_point() for name, tensor in module.state_dict().items()})
        module.load_state_dict(tensors)
        check_values(tensors, {name: tensor.cpu().numpy() for name, tensor in module.state_dict().items()})
    except InputError as error:
        raise InputError(f"--weights {path}: {error}") from None
