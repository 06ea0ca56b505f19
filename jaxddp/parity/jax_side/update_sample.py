"""Elements of a model's parameters whose updates represent those of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.rate_curves import places_of


@dataclass(frozen=True)
class Sample:
    """Elements of the parameters, whose updates are looked at.

    Attributes:
        elements: name in jax -> flat places in its array.
        tensors: torch's name of each element, in this order.
        groups: number of torch's group of each.
        places: flat place of each in torch's tensor.
    """

    elements: Mapping[str, np.ndarray]
    tensors: np.ndarray
    groups: np.ndarray
    places: np.ndarray

    def of(self, names: Mapping[str, Any]) -> "Sample":
        """Return the elements of some of jax's parameters."""
        keys = np.repeat([*self.elements], [len(places) for places in self.elements.values()])
        kept = np.isin(keys, [*names])
        elements = {name: places for name, places in self.elements.items() if name in names}
        return Sample(elements, self.tensors[kept], self.groups[kept], self.places[kept])

    def of_tensors(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (n, elements) from arrays (n, places) of torch's tensors, whose places are `places_of`."""
        columns = []
        for tensor, place in zip(self.tensors, self.places, strict=True):
            places = np.unique(self.places[self.tensors == tensor])
            columns.append(arrays[tensor][:, np.searchsorted(places, place)])
        return np.stack(columns, axis=1)


def sampled(side: JaxSide, start: Arrays, groups: Sequence[Sequence[str]]) -> Sample:
    """Choose elements of the parameters in torch's groups, and find them in jax's arrays.

    Args:
        side: the jax side.
        start: initial weights under torch's names.
        groups: names of the parameters of each group.
    """
    params = side.from_torch(start)[0]
    starts = np.cumsum([0, *(x.size for x in params.values())])[:-1]
    numbers = {
        name: first + np.arange(x.size, dtype=float).reshape(x.shape)
        for first, (name, x) in zip(starts, params.items(), strict=True)
    }
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    rows: list[tuple[int, int, str, int]] = []
    for tensor, of_tensor in side.to_torch(numbers).items():
        flat = np.asarray(of_tensor).reshape(-1)
        if tensor not in group_of or len(np.unique(flat)) < flat.size:  # one of two tensors whose sum jax has
            continue
        for place in places_of(flat.size, len(group_of)):
            leaf = int(np.searchsorted(starts, flat[place], side="right")) - 1
            rows.append((leaf, int(flat[place] - starts[leaf]), tensor, int(place)))
    rows.sort()
    leaves, of_jax, tensors, places = (np.asarray(column) for column in zip(*rows, strict=True))
    elements = {name: of_jax[leaves == leaf] for leaf, name in enumerate(params) if (leaves == leaf).any()}
    return Sample(elements, tensors, np.asarray([group_of[name] for name in tensors]), places)
