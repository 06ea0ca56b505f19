"""Dropout that drops what `jaxddp.nn.layers.Dropout` drops: masks from the seed and from where in the run they are for.

`torch.nn.Dropout` draws from a generator, whose state the next mask depends on; it may be used just as well, and drops
other elements.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_ref import threefry


class Place(NamedTuple):
    """Where in a run a forward pass is.

    Attributes:
        step: optimizer steps made before.
        first: examples that this rank has had before in this step.
        rank, world_size: who runs it.
    """

    step: int = 0
    first: int = 0
    rank: int = 0
    world_size: int = 1


class Dropout(nn.Module):
    """y = x / (1 - p) where a word drawn for the element is at least p 2**32, else 0; in training only.

    The words are drawn on the CPU, as `jaxddp.nn.dropout_rng` says; `move_to` sets the position in the run.

    Args:
        p: the share that is dropped, at least 0 and below 1.
        number: how many Dropout layers the model has before this one.
        masks: "replica": each rank draws its own; "shared": all the same; "example": each example its own, whatever
            the number of ranks.
        seed: None: the one that torch's global generator was given.

    >>> Dropout(0.5, number=0, seed=0)(torch.ones(8))
    tensor([0., 2., 0., 2., 0., 0., 0., 2.])
    """

    def __init__(self, p: float, *, number: int, masks: str = "replica", seed: int | None = None):
        super().__init__()
        self.p = p
        self.masks = masks
        self._key = threefry.fold_in(threefry.key(torch.initial_seed() if seed is None else seed), number)
        self.move_to(None)

    def move_to(self, place: Place | None) -> None:
        """The next forward pass is here; None: at no place in particular."""
        self._place, self._calls = place, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = self._words(tuple(x.shape)) >= np.uint32(int(self.p * 2**32))
        self._calls += 1
        return torch.where(torch.from_numpy(kept).to(x.device), x / (1 - self.p), 0)

    def _words(self, shape: tuple[int, ...]) -> threefry.Words:
        place = self._place
        if place is None:
            return self._drawn(self._key, shape)
        key = threefry.fold_in(self._key, place.step)
        if self.masks == "example":
            places = (place.first + np.arange(shape[0])) * place.world_size + place.rank
            return np.stack([self._drawn(threefry.fold_in(key, int(number)), shape[1:]) for number in places])
        key = threefry.fold_in(key, place.first)
        return self._drawn(threefry.fold_in(key, place.rank) if self.masks == "replica" else key, shape)

    def _drawn(self, key: threefry.Words, shape: tuple[int, ...]) -> threefry.Words:
        return threefry.bits(threefry.fold_in(key, self._calls), shape)


def dropout_layer(p: float, masks: str) -> nn.Module:
    """A model's only Dropout layer; nothing at all if p is 0."""
    return Dropout(p, number=0, masks=masks) if p else nn.Identity()


def move_to(model: nn.Module, place: Place) -> None:
    """Tell every Dropout layer of a model where in the run its next forward pass is."""
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.move_to(place)
