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
LAYERS = (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED)
TORCHS = ("weight", "embedding", "embeddings")  # names of matrices in torch's layout, where the shape fits both
OF_HAIKU = {"w": "weight", "b": "bias", "embeddings": "weight"}
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
        name, rows = _tensor_name(prefix, leaf, modules.get(prefix), tensors), None
    if name not in tensors:
        return f"flax's {flax} {shape} has no twin in torch, {name} is not there"
    of_torch = tensors[name] if rows is None else (rows.stop - rows.start, *tensors[name][1:])
    layer = modules.get(name.rpartition(".")[0]) if name.endswith("weight") else None
    layouts = _layouts(layer, flax.rpartition(".")[2], of_torch, shape, as_gradient)
    if layouts is None:
        return f"flax's {flax} {shape} cannot be torch's {name} {of_torch}"
    return Piece(flax, name, rows, shape, of_torch, *layouts)


def _tensor_name(prefix: str, leaf: str, module: nn.Module | None, tensors: Shapes) -> str:
    if (same := f"{prefix}.{leaf}".lstrip(".")) in tensors:
        return same
    names = {"kernel": "weight", "embedding": "weight", **OF_HAIKU}
    if isinstance(module, NORMS):
        names = {"scale": "weight", "offset": "bias", "mean": "running_mean", "var": "running_var"}
    return f"{prefix}.{names.get(leaf, leaf)}".lstrip(".")


def _of_attention(prefix: str, leaf: str, tensors: Shapes) -> tuple[str, slice | None]:
    """Return the tensor of nn.MultiheadAttention, and its rows, for flax's query, key, value and out."""
    parent, _, projection = prefix.rpartition(".")
    projection = projection.removesuffix("_proj")
    kind = {"kernel": "weight", **OF_HAIKU}.get(leaf, leaf)
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
    layer: nn.Module | None, leaf: str, torch: tuple[int, ...], flax: tuple[int, ...], as_gradient: bool
) -> tuple[Layout, Layout] | None:
    """Return the maps between a tensor and a flax array of these shapes; None if the shapes do not match.

    Args:
        layer: torch's module, if the tensor is its weight.
        leaf: last word of the flax array's name.
        torch, flax, as_gradient: see `find_piece`.
    """
    same = torch == flax or (len(torch) < 2 and math.prod(torch) == math.prod(flax))
    unchanged: tuple[Layout, Layout] = (lambda x: x.reshape(flax), lambda x: x.reshape(torch))
    if len(torch) < 2 or layer is None or not (leaf == "kernel" or isinstance(layer, LAYERS)):
        return unchanged if same else None
    ambiguous = isinstance(layer, TRANSPOSED) and not as_gradient  # and then taken for Equinox's
    if leaf in TORCHS and same and not ambiguous:
        return unchanged
    return _of_kernel(layer, leaf, torch, flax, as_gradient) or (unchanged if same else None)


def _of_kernel(
    layer: nn.Module, leaf: str, torch: tuple[int, ...], flax: tuple[int, ...], as_gradient: bool
) -> tuple[Layout, Layout] | None:
    """Return the maps between the weight of a torch layer and an array in jax's layout, inputs before outputs."""
    if isinstance(layer, TRANSPOSED):
        return _of_transposed(leaf, torch, flax, as_gradient)
    if isinstance(layer, CONVOLUTIONS):
        if flax != (*torch[2:], torch[1], torch[0]):
            return None
        return lambda x: np.moveaxis(x, (0, 1), (-1, -2)), lambda x: np.moveaxis(x, (-1, -2), (0, 1))
    if len(torch) == 2 and math.prod(torch) == math.prod(flax) and torch[1] in itertools.accumulate(flax, operator.mul):
        return lambda x: x.T.reshape(flax), lambda x: x.reshape(torch[1], torch[0]).T
    return None


def _of_transposed(
    leaf: str, torch: tuple[int, ...], flax: tuple[int, ...], as_gradient: bool
) -> tuple[Layout, Layout] | None:
    """Return the maps of a ConvTranspose, reversed where jax correlates and torch convolves."""
    inputs, outputs, *spatial = torch
    axes = tuple(range(2, len(torch)))
    if leaf == "weight" and flax == (outputs, inputs, *spatial):  # Equinox's
        return lambda x: np.flip(x, axes).swapaxes(0, 1), lambda x: np.flip(x, axes).swapaxes(0, 1)
    first, last = (0, 1), ((-1, -2) if leaf == "w" else (-2, -1))
    channels = (outputs, inputs) if leaf == "w" else (inputs, outputs)  # w is Haiku's
    if not as_gradient and flax == (*spatial, *channels):
        return (
            lambda x: np.moveaxis(np.flip(x, axes), first, last),
            lambda x: np.flip(np.moveaxis(x, last, first), axes),
        )
    if flax == (*spatial, outputs, inputs):
        return lambda x: np.moveaxis(x, (0, 1), (-1, -2)), lambda x: np.moveaxis(x, (-1, -2), (0, 1))
    return None
