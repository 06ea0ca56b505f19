"""Maps between the layouts of a torch tensor and a jax array.

The layout depends on the torch module that a tensor belongs to, so jax models of nnx and of linen are converted
alike. All maps only permute elements, so gradients, updates and moments convert as the weights do.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import nn

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Layout = Callable[[np.ndarray], np.ndarray]

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
LAYERS = (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED, *RECURRENT)
TORCHS = ("weight", "embedding")  # beginnings of names of matrices in torch's layout, where the shape fits both


class Layouts(NamedTuple):
    """Maps between a tensor in torch's layout and an array in jax's."""

    to_jax: Layout
    to_torch: Layout


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether a module is Hugging Face's Conv1D, a Linear whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def word_for_outputs(module: nn.Module | None) -> str:
    """Return what the entries along a layer's axis of outputs are called: the rows of an embedding, or outputs."""
    return "rows" if isinstance(module, EMBEDDINGS) else "outputs"


def outputs_axis(module: nn.Module | None, ndim: int) -> int:
    """Return the axis of a module's outputs in a tensor of this many axes."""
    return 1 if ndim > 1 and (is_conv1d(module) or isinstance(module, TRANSPOSED)) else 0


def find_layouts(
    module: nn.Module | None, leaf: str, torch: Shape, jax: Shape, as_gradient: bool = False
) -> Layouts | None:
    """Return the maps between a tensor and a jax array of these shapes; None if the shapes do not match.

    Args:
        module: torch module whose weight the tensor is; None: it is no weight of a module.
        leaf: last part of the jax array's name.
        torch, jax: shapes.
        as_gradient: the array is the kernel of a jax ConvTranspose with `transpose_kernel=True`.
    """
    size = math.prod(torch) == math.prod(jax)
    same = size and (len(torch) < 2 or squeezed(torch) == squeezed(jax))
    unchanged = Layouts(lambda x: x.reshape(jax), lambda x: x.reshape(torch))
    if len(torch) < 2 or module is None or not (leaf == "kernel" or isinstance(module, LAYERS) or is_conv1d(module)):
        return unchanged if same else None
    if is_conv1d(module):
        return unchanged if same or _splits(torch, jax) else None
    ambiguous = isinstance(module, TRANSPOSED) and not as_gradient  # and then taken for Equinox's
    if leaf.startswith(TORCHS) and same and not ambiguous:
        return unchanged
    return _of_kernel(module, leaf, torch, jax, as_gradient) or (unchanged if same else None)


def _of_kernel(module: nn.Module, leaf: str, torch: Shape, jax: Shape, as_gradient: bool) -> Layouts | None:
    """Return the maps between the weight of a torch layer and an array in jax's layout, inputs before outputs."""
    if isinstance(module, TRANSPOSED):
        return _of_transposed(leaf, torch, jax, as_gradient)
    if isinstance(module, CONVOLUTIONS):
        if jax != (*torch[2:], torch[1], torch[0]):
            return None
        return Layouts(lambda x: np.moveaxis(x, (0, 1), (-1, -2)), lambda x: np.moveaxis(x, (-1, -2), (0, 1)))
    if _splits(torch[::-1], jax):
        return Layouts(lambda x: x.T.reshape(jax), lambda x: x.reshape(torch[1], torch[0]).T)
    return None


def _of_transposed(leaf: str, torch: Shape, jax: Shape, as_gradient: bool) -> Layouts | None:
    """Return the maps of a ConvTranspose, reversed where jax correlates and torch convolves."""
    inputs, outputs, *spatial = torch
    axes = tuple(range(2, len(torch)))
    if leaf == "weight" and jax == (outputs, inputs, *spatial):  # Equinox's
        return Layouts(lambda x: np.flip(x, axes).swapaxes(0, 1), lambda x: np.flip(x, axes).swapaxes(0, 1))
    first, last = (0, 1), ((-1, -2) if leaf == "w" else (-2, -1))
    channels = (outputs, inputs) if leaf == "w" else (inputs, outputs)  # w is Haiku's
    if not as_gradient and jax == (*spatial, *channels):
        return Layouts(
            lambda x: np.moveaxis(np.flip(x, axes), first, last),
            lambda x: np.flip(np.moveaxis(x, last, first), axes),
        )
    if jax == (*spatial, outputs, inputs):
        return Layouts(lambda x: np.moveaxis(x, (0, 1), (-1, -2)), lambda x: np.moveaxis(x, (-1, -2), (0, 1)))
    return None


def squeezed(shape: Shape) -> Shape:
    """Return a shape without its axes of size 1, which change the order of no elements."""
    return tuple(size for size in shape if size != 1)


def _splits(matrix: Shape, jax: Shape) -> bool:
    """Return whether jax's axes are those of a matrix (in, out), each as one or several."""
    same_size = len(matrix) == 2 and math.prod(matrix) == math.prod(jax)
    return same_size and matrix[0] in itertools.accumulate(jax, operator.mul)


def transposition(axes: Shape) -> Layouts:
    """Return the maps between a tensor and its transpose, whose axes are `axes` of the tensor."""
    back = tuple(int(axis) for axis in np.argsort(axes))
    return Layouts(lambda x: x.transpose(axes), lambda x: x.transpose(back))


def channels_last(image: Shape, axis: int) -> Layouts:
    """Return the maps between a tensor with a flattened image (C, ...) along an axis, and one with (..., C) there.

    >>> to_jax, to_torch = channels_last((2, 3), 0)
    >>> to_jax(np.arange(6)).tolist(), to_torch(to_jax(np.arange(6))).tolist()
    ([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5])
    """
    last = axis + len(image) - 1
    moved = (*image[1:], image[0])

    def map_with(shape: Shape, source: int, target: int) -> Layout:
        return lambda x: np.moveaxis(x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :]), source, target).reshape(
            x.shape
        )

    return Layouts(map_with(image, axis, last), map_with(moved, last, axis))


def after(first: Layouts, second: Layouts) -> Layouts:
    """Return the maps that apply `first` to torch's tensor, then `second`."""
    return Layouts(lambda x: second.to_jax(first.to_jax(x)), lambda x: first.to_torch(second.to_torch(x)))
