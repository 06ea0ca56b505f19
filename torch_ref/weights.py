"""Weights by torch's names in .safetensors files, as jaxddp reads and writes them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from jaxddp.errors import InputError
from jaxddp.runlog import write_atomically


def save_weights(path: Path, module: nn.Module) -> None:
    """Write the module's state_dict."""
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in module.state_dict().items()}))


def load_weights(path: str | Path, module: nn.Module) -> None:
    """Give the module the file's parameters and buffers, in the module's dtype.

    Raises:
        InputError: the file is missing or no safetensors file, or does not fit: then the message
            lists every tensor that is missing, left over, or of another shape.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--weights {path}: not a readable safetensors file ({error})") from None
    if problems := differences(tensors, module.state_dict()):
        raise InputError(f"--weights {path}: does not fit the model: {'; '.join(problems)}")
    module.load_state_dict(tensors)


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """What is missing, left over, or of another shape; empty if the names and shapes are the same.

    >>> import torch
    >>> differences({"a": torch.zeros(2), "c": torch.zeros(1)}, {"a": torch.zeros(3), "b": torch.zeros(1)})
    ['a has shape (2,) and not (3,)', 'left over c', 'missing b']
    """
    problems = [f"missing {name}" for name in expected.keys() - found.keys()]
    problems += [f"left over {name}" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(found[name].shape)} and not {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if found[name].shape != expected[name].shape
    ]
    return sorted(problems)
