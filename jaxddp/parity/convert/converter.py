"""Conversion between a torch module's tensors and its flax twin's arrays."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import nn

from jaxddp.errors import InputError, listed
from jaxddp.parity.convert.layouts import Piece, Shapes, find_piece, renamed
from jaxddp.parity.convert.proposal import Unpaired, proposed_names
from jaxddp.parity.records import COUNTER, Arrays, Joined, Renamed


class NamesError(InputError):
    """Arrays without a twin; the message proposes a table of names if layers pair off.

    Args:
        of_flax: a line for each flax array.
        unpaired: the arrays.
        names: the table that did not help.

    Attributes:
        says: the message without the table.
    """

    def __init__(self, of_flax: list[str], unpaired: Unpaired, names: Mapping[str, str]):
        self._unpaired, self._names = unpaired, dict(names)
        of_torch = [f"torch's {name} {unpaired.tensors[name]} has no twin in flax" for name in unpaired.torch]
        self.says = f"names: {'; '.join(listed(problems) for problems in (of_flax, of_torch) if problems)}"
        table = self.proposed()
        super().__init__(f"{self.says}; perhaps names = {table}" if table else self.says)

    def proposed(self, flax_order: Sequence[str] = (), torch_order: Sequence[str] = ()) -> dict[str, str]:
        """Return the table with the lines that may be missing, or {} if there are none.

        Args:
            flax_order, torch_order: layers in the order of their use; others come last.
        """
        proposed = proposed_names(self._unpaired.in_order(flax_order, torch_order))
        return self._names | proposed if proposed else {}


class Converter:
    """A converter between the state_dict of a torch module and the flat arrays of a flax model.

    Args:
        module: the torch module.
        shapes: the flax model's parameters and buffers, names ("layers.0.kernel") to shapes.
        names: flax prefixes to torch prefixes, where the two differ ({"Dense_0": "fc1"}).
        transpose_kernel: prefixes of the flax ConvTranspose layers that have `transpose_kernel=True`, or whose array
            called weight has torch's layout; needed only for layers with as many inputs as outputs, whose shape fits
            both layouts.
        no_twin: names of arrays of either side that the other does not have; only constants, no parameters.

    Attributes:
        pieces: each flax array with the torch tensor, or rows of one, that it corresponds to.
        tied: further names of tied torch parameters to their first name.

    Raises:
        InputError: `no_twin` names a torch parameter, or nothing.
        NamesError: an array has no twin, or a twin of another shape; it proposes `names` if layers pair off.

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
        no_twin: Collection[str] = (),
    ):
        self._tensors = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.tied = tied_names(module)
        modules = dict(module.named_modules(remove_duplicate=False))
        self.pieces: list[Piece] = []
        unmapped: dict[str, str] = {}
        _check_no_twin(no_twin, module, shapes)
        for flax, shape in shapes.items():
            if flax in no_twin:
                continue
            as_gradient = flax.rpartition(".")[0] in transpose_kernel
            piece = find_piece(flax, renamed(flax, names or {}), shape, modules, self._tensors, as_gradient)
            if isinstance(piece, str):
                unmapped[flax] = piece
            else:
                self.pieces.append(piece)
        covered = {self.tied.get(piece.torch, piece.torch) for piece in self.pieces}
        missing = [
            name
            for name in self._tensors
            if self.tied.get(name, name) not in covered and name.rpartition(".")[2] != COUNTER and name not in no_twin
        ]
        if unmapped or missing:
            unpaired = Unpaired(list(unmapped), missing, shapes, self._tensors, modules)
            raise NamesError(list(unmapped.values()), unpaired, names or {})

    def to_flax(self, tensors: Arrays) -> dict[str, np.ndarray]:
        """Convert a torch state_dict to flax arrays."""
        arrays = {}
        for piece in self.pieces:
            tensor = tensors[piece.torch]
            arrays[piece.flax] = np.array(piece.to_flax(tensor if piece.rows is None else tensor[piece.rows]))
        return arrays

    def to_torch(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """Convert flax arrays to torch tensors, tied ones under each of their names.

        Args:
            arrays: some or all of the model's arrays, or gradients, updates or moments of them.
        """
        tensors: dict[str, np.ndarray] = {}
        for piece in self.pieces:
            if piece.flax not in arrays:
                continue
            value = np.array(piece.to_torch(np.asarray(arrays[piece.flax])))
            if piece.rows is None:
                tensors[piece.torch] = value
            else:
                whole = tensors.setdefault(piece.torch, np.zeros(self._tensors[piece.torch], value.dtype))
                whole[piece.rows] = value
        return dict(under_all_names(tensors, self.tied))


def _check_no_twin(names: Collection[str], module: nn.Module, shapes: Shapes) -> None:
    parameters, tensors = dict(module.named_parameters(remove_duplicate=False)), module.state_dict()
    for name in names:
        if name in parameters:
            raise InputError(f"no_twin: torch's {name} is a parameter; must be a constant")
        if name not in tensors and name not in shapes:
            raise InputError(f"no_twin: {name} is in neither model")


def under_all_names(tensors: Arrays, tied: Mapping[str, str]) -> Arrays:
    """Return the tensors with tied ones under each of their names; none is read before it is asked for.

    Args:
        tensors: torch tensors, tied ones under one or several of their names.
        tied: further names of tied parameters to their first name, see `tied_names`.

    >>> twice = nn.Linear(1, 1, bias=False)
    >>> sorted(under_all_names({"0.weight": np.ones((1, 1))}, tied_names(nn.Sequential(twice, twice))))
    ['0.weight', '1.weight']
    """
    known = {tied.get(name, name): name for name in tensors}
    names = {name: known[first] for pair in tied.items() for name, first in (pair, pair[1:] * 2) if first in known}
    return Joined(tensors, Renamed(tensors, names)) if names else tensors


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first name.

    >>> twice = nn.Linear(1, 1, bias=False)
    >>> tied_names(nn.Sequential(twice, twice))
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied
