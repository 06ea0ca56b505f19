"""Weights between a torch module and its flax twin: names, layouts, both directions, nothing left over.

    torch                                   flax
    Linear           weight (out, in)       kernel (in, out); LinearGeneral's (*in, *out)
    Conv1d..3d       weight (out, in/g, *k) kernel (*k, in/g, out)
    ConvTranspose    weight (in, out, *k)   kernel (*k, in, out) with k reversed, or (*k, out, in)
    Embedding        weight (num, features) embedding
    norms            weight, running_mean   scale, mean; running_var: var
    MultiheadAttention
        in_proj_weight (3 E, E)             query, key, value: kernel (E, heads, E / heads)
        out_proj.weight                     out.kernel (heads, E / heads, E)
    any other parameter                     the same name and shape

What a torch tensor becomes depends on the torch module that it belongs to, so flax models of
nnx and of linen are converted alike. All maps are linear and permute elements only: gradients,
updates and moments travel as the weights do.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from jaxddp.errors import InputError

Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
Layout = Callable[[np.ndarray], np.ndarray]

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
COUNTER = "num_batches_tracked"  # torch's BatchNorm counts its batches, flax's does not; nothing depends on it
PROJECTIONS = ("query", "key", "value")  # thirds of in_proj_weight, in this order


@dataclass(frozen=True)
class Piece:
    """A flax array and the torch tensor, or the rows of one, that it is.

    Attributes:
        flax: the flax array's name.
        torch: the tensor's name in the state_dict.
        rows: which of the tensor's rows; None: all.
        to_flax, to_torch: the change of layout.
    """

    flax: str
    torch: str
    rows: slice | None
    to_flax: Layout
    to_torch: Layout

    @property
    def name(self) -> str:
        """The tensor's name, with the rows if it has more."""
        return self.torch if self.rows is None else f"{self.torch}[{self.rows.start}:{self.rows.stop}]"


class Converter:
    """Translates between the state_dict of a torch module and the flat arrays of a flax model.

    Args:
        module: the torch module.
        shapes: the flax model's parameters and buffers, names ("layers.0.kernel") to shapes.
        names: flax prefixes to torch prefixes, where the two differ ({"Dense_0": "fc1"}).
        transpose_kernel: prefixes of the flax ConvTranspose layers that have `transpose_kernel=True`;
            asked for only where a layer has as many inputs as outputs, and its shape does not tell.

    Raises:
        InputError: an array has no twin, or one of another shape; the message lists all of them,
            and the table that would map them if there is an obvious one.

    >>> import torch
    >>> converter = Converter(nn.Sequential(nn.Linear(3, 2)), {"Dense_0.kernel": (3, 2), "Dense_0.bias": (2,)},
    ...                       names={"Dense_0": "0"})
    >>> converter.to_torch({"Dense_0.kernel": np.ones((3, 2)), "Dense_0.bias": np.zeros(2)})["0.weight"].shape
    (2, 3)
    """

    def __init__(
        self,
        module: nn.Module,
        shapes: Shapes,
        names: Mapping[str, str] | None = None,
        transpose_kernel: Collection[str] = (),
    ):
        self._state = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
        self._tied = _tied(module)
        modules = dict(module.named_modules(remove_duplicate=False))
        self.pieces: list[Piece] = []
        problems, unmapped = [], []
        for flax, shape in shapes.items():
            as_gradient = flax.rpartition(".")[0] in transpose_kernel
            piece = _piece(flax, _renamed(flax, names or {}), shape, modules, self._state, as_gradient)
            if isinstance(piece, str):
                problems.append(piece)
                unmapped.append(flax)
            else:
                self.pieces.append(piece)
        covered = {self._tied.get(piece.torch, piece.torch) for piece in self.pieces}
        missing = [
            name
            for name in self._state
            if self._tied.get(name, name) not in covered and name.rpartition(".")[2] != COUNTER
        ]
        problems += [f"torch's {name} {self._state[name].shape} has no twin in flax" for name in missing]
        if problems:
            raise InputError(f"names: {'; '.join(problems)}{_advice(unmapped, missing, shapes, self._state)}")

    @property
    def untied(self) -> list[tuple[str, str]]:
        """Flax arrays that are independent, and in torch one and the same tensor."""
        first: dict[str, str] = {}
        pairs = []
        for piece in self.pieces:
            tensor = self._tied.get(piece.torch, piece.torch)
            if piece.rows is None and tensor in first:
                pairs.append((first[tensor], piece.flax))
            first.setdefault(tensor, piece.flax)
        return pairs

    def to_flax(self, tensors: Arrays) -> dict[str, np.ndarray]:
        """A torch state_dict as flax arrays."""
        arrays = {}
        for piece in self.pieces:
            tensor = tensors[piece.torch]
            arrays[piece.flax] = np.array(piece.to_flax(tensor if piece.rows is None else tensor[piece.rows]))
        return arrays

    def to_torch(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Flax arrays as torch tensors, those that they make up; tied ones under each of their names.

        Args:
            arrays: some or all of the model's, or as many gradients, updates or moments.
        """
        tensors: dict[str, np.ndarray] = {}
        for piece in self.pieces:
            if piece.flax not in arrays:
                continue
            value = np.array(piece.to_torch(np.asarray(arrays[piece.flax])))
            if piece.rows is None:
                tensors[piece.torch] = value
            else:
                whole = tensors.setdefault(piece.torch, np.zeros(self._state[piece.torch].shape, value.dtype))
                whole[piece.rows] = value
        for name, first in self._tied.items():
            known = [other for other in (name, first) if other in tensors]
            if known:
                tensors.setdefault(name, tensors[known[0]])
                tensors.setdefault(first, tensors[known[0]])
        return tensors


def _tied(module: nn.Module) -> dict[str, str]:
    """Names of a parameter that has several, to the first of them."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied


def _renamed(flax: str, names: Mapping[str, str]) -> str:
    """The name with its longest prefix in the table replaced."""
    for prefix in sorted(names, key=len, reverse=True):
        if flax == prefix or flax.startswith(prefix + "."):
            return (names[prefix] + flax[len(prefix) :]).lstrip(".")
    return flax


def _piece(
    flax: str, path: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module], state: Arrays, as_gradient: bool
) -> Piece | str:
    """The piece for a flax array whose torch-side path is `path`; a string says why there is none."""
    prefix, _, leaf = path.rpartition(".")
    if isinstance(modules.get(prefix.rpartition(".")[0]), nn.MultiheadAttention):
        name, rows = _of_attention(prefix, leaf, state)
    else:
        name, rows = _tensor_name(prefix, leaf, modules.get(prefix)), None
    if name not in state:
        return f"flax's {flax} {shape} has no twin in torch, {name} is not there"
    tensor = state[name] if rows is None else state[name][rows]
    layouts = _layouts(modules.get(name.rpartition(".")[0]), leaf, tensor.shape, shape, as_gradient)
    if layouts is None:
        return f"flax's {flax} {shape} cannot be torch's {name} {tensor.shape}"
    return Piece(flax, name, rows, *layouts)


def _tensor_name(prefix: str, leaf: str, module: nn.Module | None) -> str:
    names = {"kernel": "weight", "embedding": "weight"}
    if isinstance(module, NORMS):
        names = {"scale": "weight", "mean": "running_mean", "var": "running_var"}
    return f"{prefix}.{names.get(leaf, leaf)}".lstrip(".")


def _of_attention(prefix: str, leaf: str, state: Arrays) -> tuple[str, slice | None]:
    """The tensor of nn.MultiheadAttention, and its rows, for flax's query, key, value and out."""
    parent, _, projection = prefix.rpartition(".")
    kind = {"kernel": "weight"}.get(leaf, leaf)
    if projection not in PROJECTIONS:
        return f"{parent}.out_proj.{kind}".lstrip("."), None
    separate = f"{parent}.{projection[0]}_proj_weight".lstrip(".")  # where keys or values have another size
    if kind == "weight" and separate in state:
        return separate, None
    name = f"{parent}.in_proj_{kind}".lstrip(".")
    size = len(state[name]) // 3 if name in state else 0
    first = PROJECTIONS.index(projection) * size
    return name, slice(first, first + size)


def _layouts(
    module: nn.Module | None, leaf: str, torch: tuple[int, ...], flax: tuple[int, ...], as_gradient: bool
) -> tuple[Layout, Layout] | None:
    """The maps between a tensor and a flax array of these shapes; None if they cannot be the same."""
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


def _advice(unmapped: list[str], missing: list[str], shapes: Shapes, state: Arrays) -> str:
    """A table that would map what is left over, if modules pair off in order by their tensors' sizes."""
    flax = _by_module({name: shapes[name] for name in unmapped})
    torch = _by_module({name: state[name].shape for name in missing})
    if not flax or len(flax) != len(torch):
        return ""
    pairs = list(zip(flax.items(), torch.items(), strict=True))
    if any(sorted(sizes) != sorted(other) for (_, sizes), (_, other) in pairs):
        return ""
    return "; perhaps names = " + repr({name: other for (name, _), (other, _) in pairs})


def _by_module(shapes: Shapes) -> dict[str, list[int]]:
    """Modules, in order, to the sizes of their arrays."""
    sizes: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        sizes.setdefault(name.rpartition(".")[0], []).append(math.prod(shape))
    return sizes
