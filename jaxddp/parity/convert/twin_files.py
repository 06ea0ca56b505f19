"""Files of weights with the other side's names, for the trainers: converted as the check maps the two models.

This module imports no jax, and the trainers import it only for such a file.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from jaxddp.errors import InputError
from jaxddp.parity.convert.converter import Converter, under_all_names
from jaxddp.parity.convert.layouts import Shapes
from jaxddp.program import Program


def to_jax(tensors: Mapping[str, np.ndarray], program: Program, shapes: Shapes) -> dict[str, np.ndarray]:
    """Return the arrays of a program's JAX model, of a state_dict of its torch model.

    Args:
        shapes: shapes of the JAX model's arrays.

    Raises:
        InputError: the two models do not map, or the tensors are not those of the torch model.
    """
    (make,) = program.need("torch_model", reason=", whose names the file may have")
    converter = _converter(program, make(), shapes)
    wanted = {piece.torch for piece in converter.pieces}
    named = under_all_names(tensors, converter.tied)
    if missing := sorted(wanted - named.keys()):
        raise InputError(f"has neither model's names: no {missing[0]}")
    return converter.to_jax(named)


def to_torch(arrays: Mapping[str, np.ndarray], program: Program, module: nn.Module) -> dict[str, Any]:
    """Return the tensors of a program's torch module, of the arrays of its JAX model by their names.

    Raises:
        InputError: the two models do not map.
    """
    return _converter(program, module, {name: array.shape for name, array in arrays.items()}).to_torch(arrays)


def _converter(program: Program, module: nn.Module, shapes: Shapes) -> Converter:
    options = program.get("names", {}), program.get("transpose_kernel", ()), program.get("no_twin", ())
    return Converter(module, shapes, *options)
