"""Maps between the layouts of a torch tensor and a jax array.

The layout depends on the torch module that a tensor belongs to, so jax models of nnx and of linen are converted
alike. All maps only permute elements, so gradients, updates and moments convert like the weights.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
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
RECURRENT, GRUS = (nn.RNNBase, nn.RNNCellBase), (nn.GRU, nn.GRUCell)
LAYERS = (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED, *RECURRENT)
TORCHS = ("weight", "embedding")  # beginnings of names of matrices in torch's layout, where the shape fits both


class Layouts(NamedTuple):
    """Maps between a tensor in torch's layout and an array in jax's.

    Attributes:
        to_jax, to_torch: the maps.
        order: order of the jax array's axes in words, "(in, out)"; "": there is one possibility.
        axes: axes of torch's tensor in jax's order, where no axis is reversed, split or merged; (): one is.
    """

    to_jax: Layout
    to_torch: Layout
    order: str = ""
    axes: Shape = ()


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether a module is Hugging Face's Conv1D, a Linear whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def word_for_outputs(module: nn.Module | None) -> str:
    """Return what the entries along a layer's axis of outputs are called: the rows of an embedding, or outputs."""
    return "rows" if isinstance(module, EMBEDDINGS) else "outputs"


def outputs_axis(module: nn.Module | None, ndim: int) -> int:
    """Return the axis of a module's outputs in a tensor of this many axes."""
    return 1 if ndim > 1 and (is_conv1d(module) or isinstance(module, TRANSPOSED)) else 0


def is_conventional(module: nn.Module | None, leaf: str) -> bool:
    """Return whether the first of `find_layouts` holds by convention, as for the kernels of flax's layers."""
    return leaf == "kernel" and isinstance(module, (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED))


def find_layouts(
    module: nn.Module | None, leaf: str, torch: Shape, jax: Shape, as_gradient: bool = False
) -> list[Layouts]:
    """Return the maps between a tensor and a jax array that these shapes allow, the likeliest first.

    Args:
        module: torch module whose weight the tensor is; None: it is not the weight of a module.
        leaf: last part of the jax array's name.
        torch, jax: shapes.
        as_gradient: the array is the kernel of a jax ConvTranspose with `transpose_kernel=True`.
    """
    unchanged: list[Layouts] = []
    if math.prod(torch) == math.prod(jax) and (len(torch) < 2 or squeezed(torch) == squeezed(jax)):
        axes = tuple(range(len(torch))) if len(torch) == len(jax) else ()
        order = _order(is_conv1d(module) or isinstance(module, TRANSPOSED), len(torch), first=True)
        unchanged = [Layouts(lambda x: x.reshape(jax), lambda x: x.reshape(torch), order, axes)]
    if len(torch) < 2 or module is None or not (leaf == "kernel" or isinstance(module, LAYERS) or is_conv1d(module)):
        return unchanged
    if len(squeezed(torch)) < 2 and unchanged:
        return unchanged
    permuted = [*_permuted(module, leaf, torch, jax, as_gradient)]
    equinox = isinstance(module, TRANSPOSED) and not as_gradient  # whose weight is reversed
    torch_first = is_conv1d(module) or (leaf.startswith(TORCHS) and not equinox)
    layouts = [*unchanged, *permuted] if torch_first else [*permuted, *unchanged]
    return layouts[:1] if as_gradient else layouts


def _order(inputs_first: bool, ndim: int, first: bool) -> str:
    """Return the order of axes in words; `first`: the channels come first, before the axes of a convolution."""
    channels = "in, out" if inputs_first else "out, in"
    return f"({channels})" if ndim < 3 else f"({channels}, ...)" if first else f"(..., {channels})"


def _permuted(module: nn.Module, leaf: str, torch: Shape, jax: Shape, as_gradient: bool) -> Iterator[Layouts]:
    """Yield the maps between the weight of a torch layer and an array with its axes in another order."""
    ndim = len(torch)
    if isinstance(module, TRANSPOSED):
        yield from _of_transposed(leaf, torch, jax, as_gradient)
    elif isinstance(module, CONVOLUTIONS):
        if jax == (*torch[2:], torch[1], torch[0]):
            yield transposition((*range(2, ndim), 1, 0))._replace(order=_order(True, ndim, first=False))
    elif is_conv1d(module) and jax == torch[::-1]:  # Hugging Face's FlaxConv1D
        yield transposition((1, 0))._replace(order=_order(False, ndim, first=True))
    elif is_conv1d(module) and _splits(torch, jax) and squeezed(torch) != squeezed(jax):
        yield Layouts(lambda x: x.reshape(jax), lambda x: x.reshape(torch), _order(True, ndim, first=True))
    elif not is_conv1d(module) and _splits(torch[::-1], jax):
        axes = (1, 0) if len(jax) == 2 else ()
        order = _order(True, ndim, first=True)
        yield Layouts(lambda x: x.T.reshape(jax), lambda x: x.reshape(torch[1], torch[0]).T, order, axes)


def _of_transposed(leaf: str, torch: Shape, jax: Shape, as_gradient: bool) -> Iterator[Layouts]:
    """Yield the maps of a ConvTranspose, reversed where jax correlates and torch convolves."""
    inputs, outputs, *spatial = torch
    axes, ndim = tuple(range(2, len(torch))), len(torch)
    if leaf == "weight" and jax == (outputs, inputs, *spatial):  # Equinox's
        turned: Layout = lambda x: np.flip(x, axes).swapaxes(0, 1)  # noqa: E731
        yield Layouts(turned, turned, _order(False, ndim, first=True))
    first, last = (0, 1), ((-1, -2) if leaf == "w" else (-2, -1))
    channels = (outputs, inputs) if leaf == "w" else (inputs, outputs)  # w is Haiku's
    if not as_gradient and jax == (*spatial, *channels):
        yield Layouts(
            lambda x: np.moveaxis(np.flip(x, axes), first, last),
            lambda x: np.flip(np.moveaxis(x, last, first), axes),
            _order(leaf != "w", ndim, first=False),
        )
    if jax == (*spatial, outputs, inputs) and (as_gradient or leaf != "w"):
        yield transposition((*axes, 1, 0))._replace(order=_order(False, ndim, first=False))


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
    return Layouts(lambda x: x.transpose(axes), lambda x: x.transpose(back), axes=axes)


def channels_last(image: Shape, axis: int) -> Layouts:
    """Return the maps between a tensor with a flattened image (C, ...) along an axis, and one with (..., C) there.

    >>> layouts = channels_last((2, 3), 0)
    >>> layouts.to_jax(np.arange(6)).tolist(), layouts.to_torch(layouts.to_jax(np.arange(6))).tolist()
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
    return second._replace(
        to_jax=lambda x: second.to_jax(first.to_jax(x)), to_torch=lambda x: first.to_torch(second.to_torch(x)), axes=()
    )
