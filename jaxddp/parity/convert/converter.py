"""Conversion between a torch module's tensors and its jax twin's arrays."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from jaxddp.errors import InputError, listed
from jaxddp.parity.convert.layer_pairs import Unpaired
from jaxddp.parity.convert.layouts import Shapes
from jaxddp.parity.convert.matching import Match, Models, tied_names
from jaxddp.parity.convert.pieces import Index
from jaxddp.parity.convert.proposal import Proposal, propose
from jaxddp.parity.lazy_arrays import Arrays, Joined, Renamed
from jaxddp.parity.port.rules import Names

__all__ = ["Arrays", "Converter", "NamesError", "tied_names", "under_all_names"]


class NamesError(InputError):
    """Arrays without a twin; the message proposes a table of names if layers pair off.

    Args:
        models: names and shapes of both models' arrays.
        match: what maps and what does not.
        names: the table that did not help.

    Attributes:
        says: the message without the table; `why`: without its subject, too.
        unpaired: the arrays without a twin.
    """

    def __init__(self, models: Models, match: Match, names: Names):
        self._models, self._names = models, names
        self.unpaired = Unpaired(
            list(match.unmapped), list(match.lacking), models.shapes, models.tensors, models.modules
        )
        unmapped = [*match.unmapped.values()]
        lacking = [says for name, says in match.lacking.items() if not any(f"torch's {name} " in x for x in unmapped)]
        self.why = "; ".join(listed(problems) for problems in (unmapped, lacking) if problems)
        self.says = f"names: {self.why}"
        table = self.propose().certain(names)
        super().__init__(f"{self.says}; perhaps names = {table}" if table != names else self.says)

    def propose(
        self, jax_order: Sequence[str] = (), torch_order: Sequence[str] = (), constants: Collection[str] = ()
    ) -> Proposal:
        """Propose lines under which every array has a twin, or as many as shapes, names and order allow.

        Args:
            jax_order, torch_order: layers in the order of their use; others come last.
            constants: tensors and arrays that need no twin.
        """
        unpaired = self.unpaired.without(constants)

        def proposed(lonely: Collection[str]) -> Proposal:
            fits = partial(self._models.fits, self._names, {*constants, *lonely})
            ordered = unpaired.without(lonely).with_projections().in_order(jax_order, torch_order)
            return propose(ordered, self._models.tied, fits)

        proposal = proposed(())
        for lonely in () if proposal.is_complete else unpaired.optional():
            if (without := proposed(lonely)).is_complete:
                match = self._models.match({**self._names, **without.lines})
                alone = {name: says for name, says in (match.unmapped | match.lacking).items() if name not in constants}
                why = "; ".join(says for says in alone.values() if says not in self.says)
                return replace(without, others=proposal.others, is_complete=False, why=why, alone=tuple(alone))
        return proposal


class Converter:
    """A converter between the state_dict of a torch module and the flat arrays of a jax model.

    Args:
        module: the torch module.
        shapes: the jax model's parameters and buffers, names ("layers.0.kernel") to shapes.
        names: jax prefixes to torch prefixes, where the two differ ({"Dense_0": "fc1"}), or to rules; see
            `jaxddp.parity.port.rules`.
        transpose_kernel: prefixes of the jax ConvTranspose layers that have `transpose_kernel=True`, or whose array
            called weight has torch's layout; needed only for layers with as many inputs as outputs, whose shape fits
            both layouts.
        no_twin: names of arrays of either side that the other does not have; only constants, no parameters.

    Attributes:
        pieces: each jax array, or part of one, with the torch tensor, or part of one, that it corresponds to.
        tied: further names of tied torch parameters to their first name.

    Raises:
        InputError: `no_twin` names a torch parameter, or nothing.
        RuleError: a rule does not fit the two models.
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
        names: Names | None = None,
        transpose_kernel: Collection[str] = (),
        no_twin: Collection[str] = (),
    ):
        models = Models(module, shapes, transpose_kernel, no_twin)
        match = models.match(names or {})
        if match.unmapped or match.lacking:
            raise NamesError(models, match, names or {})
        self.tied, self.pieces = models.tied, match.pieces
        self._shapes, self._tensors = models.shapes, models.tensors  # the models themselves may be large

    def to_jax(self, tensors: Arrays, adds: bool = True) -> dict[str, np.ndarray]:
        """Convert a torch state_dict to jax arrays, which may be views of the tensors.

        Without `adds`, convert gradients: that of a sum is that of its first summand.
        """
        arrays: dict[str, np.ndarray] = {}
        in_torch_layout: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        for piece in self.pieces:
            if piece.summand and not adds:
                continue
            value = tensors[piece.torch][piece.torch_outputs]
            if piece.jax_outputs:
                several = {} if piece.summand else in_torch_layout
                value = _put(several, (piece.jax, piece.place), piece.shape, piece.jax_outputs, value)
            converted = piece.layouts.to_jax(value)
            if piece.summand:
                converted = arrays[piece.jax][piece.place] + converted
            if piece.place:
                _put(arrays, piece.jax, self._shapes[piece.jax], piece.place, converted)
            else:
                arrays[piece.jax] = converted
        return arrays

    def to_torch(self, arrays: Mapping[str, Any], library: Any = np) -> dict[str, Any]:
        """Convert jax arrays to torch tensors, tied ones under each of their names; summands but the first are 0.

        Args:
            arrays: some or all of the model's arrays, or gradients, updates or moments of them.
            library: `numpy`, or `jax.numpy` within a program.
        """
        tensors: dict[str, Any] = {}
        for piece in self.pieces:
            if piece.jax not in arrays:
                continue
            value = piece.layouts.to_torch(library.asarray(arrays[piece.jax])[piece.place])[piece.jax_outputs]
            value = library.zeros_like(value) if piece.summand else value
            if piece.torch_outputs:
                _put(tensors, piece.torch, self._tensors[piece.torch], piece.torch_outputs, value, library)
            else:
                tensors[piece.torch] = library.array(value)
        return dict(under_all_names(tensors, self.tied))


def _put(
    arrays: dict[Any, Any],
    key: Any,
    shape: tuple[int, ...],
    index: Index | tuple[int, ...],
    value: Any,
    library: Any = np,
) -> Any:
    """Put a part into an array that begins as zeros; return the array."""
    array = arrays.setdefault(key, library.zeros(shape, value.dtype))
    if library is np:
        array[index] = value
    else:
        arrays[key] = array.at[index].set(value)
    return arrays[key]


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
