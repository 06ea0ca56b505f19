"""Correspondence of flax arrays to torch tensors, and the maps between their layouts.

The layout depends on the torch module that a tensor belongs to, so flax models of nnx and of linen are converted
alike. All maps only permute elements, so gradients, updates and moments convert as the weights do.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
Layout = Callable[[np.ndarray], np.ndarray]

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PROJECTIONS = ("query", "key", "value")  # thirds of in_proj_weight, in this order


@dataclass(frozen=True)
class Piece:
    """A flax array and the torch tensor, or rows of one, that it corresponds to.

    Attributes:
        flax: name of the flax array.
        torch: name of the tensor in the state_dict.
        rows: rows of the tensor; None: all.
        flax_shape, torch_shape: shapes of the array, and of the tensor or its rows.
        to_flax, to_torch: maps between the layouts.
    """

    flax: str
    torch: str
    rows: slice | None
    flax_shape: tuple[int, ...]
    torch_shape: tuple[int, ...]
    to_flax: Layout
    to_torch: Layout

    @property
    def name(self) -> str:
        """Name of the tensor, with the rows if the piece is a part of it."""
        return self.torch if self.rows is None else f"{self.torch}[{self.rows.start}:{self.rows.stop}]"


def renamed(flax: str, names: Mapping[str, str]) -> str:
    """Replace the longest prefix of a flax name that is in the table.

    >>> renamed("blocks.0.out.kernel", {"blocks": "layers", "blocks.0.out": "layers.0.proj"})
    'layers.0.proj.kernel'
    """
    for prefix in sorted(names, key=len, reverse=True):
        if flax == prefix or flax.startswith(prefix + "."):
            return (names[prefix] + flax[len(prefix) :]).lstrip(".")
    return flax


def find_piece(
    flax: str, path: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module], tensors: Shapes, as_gradient: bool
) -> Piece | str:
    """Find the torch tensor that corresponds to a flax array.

    Args:
        flax, shape: name and shape of the array.
        path: name of the array with torch's module names in place of flax's ("fc1.kernel").
        modules: torch's modules by name.
        tensors: names and shapes of torch's state_dict.
        as_gradient: the array is the kernel of a flax ConvTranspose with `transpose_kernel=True`.

    Returns:
        The piece; a string with the reason if there is none.
    """
    prefix, _, leaf = path.rpartition(".")
    if isinstance(modules.get(prefix.rpartition(".")[0]), nn.MultiheadAttention):
        name, rows = _of_attention(prefix, leaf, tensors)
    else:
        name, rows = _tensor_name(prefix, leaf, modules.get(prefix)), None
    if name not in tensors:
        return f"flax's {flax} {shape} has no twin in torch, {name} is not there"
    of_torch = tensors[name] if rows is None else (rows.stop - rows.start, *tensors[name][1:])
    layouts = _layouts(modules.get(name.rpartition(".")[0]), leaf, of_torch, shape, as_gradient)
    if layouts is None:
        return f"flax's {flax} {shape} cannot be torch's {name} {of_torch}"
    return Piece(flax, name, rows, shape, of_torch, *layouts)


def _tensor_name(prefix: str, leaf: str, module: nn.Module | None) -> str:
    names = {"kernel": "weight", "embedding": "weight"}
    if isinstance(module, NORMS):
        names = {"scale": "weight", "mean": "running_mean", "var": "running_var"}
    return f"{prefix}.{names.get(leaf, leaf)}".lstrip(".")


def _of_attention(prefix: str, leaf: str, tensors: Shapes) -> tuple[str, slice | None]:
    """Return the tensor of nn.MultiheadAttention, and its rows, for flax's query, key, value and out."""
    parent, _, projection = prefix.rpartition(".")
    kind = {"kernel": "weight"}.get(leaf, leaf)
    if projection not in PROJECTIONS:
        return f"{parent}.out_proj.{kind}".lstrip("."), None
    separate = f"{parent}.{projection[0]}_proj_weight".lstrip(".")  # used if keys or values have another size
    if kind == "weight" and separate in tensors:
        return separate, None
    name = f"{parent}.in_proj_{kind}".lstrip(".")
    size = tensors[name][0] // 3 if name in tensors else 0
    first = PROJECTIONS.index(projection) * size
    return name, slice(first, first + size)


def _layouts(
    module: nn.Module | None, leaf: str, torch: tuple[int, ...], flax: tuple[int, ...], as_gradient: bool
) -> tuple[Layout, Layout] | None:
    """Return the maps between a tensor and a flax array of these shapes; None if the shapes do not match."""
    if leaf != "kernel":
        if math.prod(torch) != math.prod(flax) or (len(torch) > 1 and torch != flax):
            return None
        return lambda x: x.reshape(flax), lambda x: x.reshape(torch)
    if isinstance(module, TRANSPOSED) and not as_gradient and flax == (*torch[2:], torch[0], torch[1]):
        spatial = tuple(range(len(torch) - 2))  # flax correlates where torch convolves
        return (
            lambda x: np.moveaxis(np.flip(x, tuple(axis + 2 for axis in spatial)), (0, 1), (-2, -1)),
            lambda x: np.moveaxis(np.flip(x, spatial), (-2, -1), (0, 1)),
        )
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        if flax != (*torch[2:], torch[1], torch[0]):
            return None
        return lambda x: np.moveaxis(x, (0, 1), (-1, -2)), lambda x: np.moveaxis(x, (-1, -2), (0, 1))
    if len(torch) == 2 and math.prod(torch) == math.prod(flax) and torch[1] in itertools.accumulate(flax, operator.mul):
        return lambda x: x.T.reshape(flax), lambda x: x.reshape(torch[1], torch[0]).T
    return None
