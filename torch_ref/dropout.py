"""Dropout with the masks of `jaxddp.nn.layers.Dropout`, which depend on the seed and the place in the run.

`torch.nn.Dropout` works as well, but draws other masks, from the state of a generator.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_ref import threefry


class Place(NamedTuple):
    """Place of a forward pass in a run.

    Attributes:
        step: number of optimizer steps before.
        first: number of this rank's examples in earlier micro-batches of the step.
        rank: number of this rank.
        world_size: number of ranks.
    """

    step: int = 0
    first: int = 0
    rank: int = 0
    world_size: int = 1


class Dropout(nn.Module):
    """Dropout, in training only: y = x / (1 - p) where the element's random word is at least p 2**32, else 0.

    The words are drawn on the CPU as in `jaxddp.nn.dropout_rng`; `move_to` sets the place in the run.

    Args:
        p: probability that an element is dropped, in [0, 1).
        number: number of Dropout layers before this one in the model.
        masks: "replica": different masks on each rank; "shared": the same masks on all ranks; "example": the same
            mask for an example, for any number of ranks.
        seed: seed of the masks; None: the seed of torch's global generator.

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
        """Set the place of the next forward pass; None: masks do not depend on a place."""
        self._place, self._calls = place, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self._words(tuple(x.shape)) >= np.uint32(int(self.p * 2**32))
        self._calls += 1
        return torch.where(torch.from_numpy(keep).to(x.device), x / (1 - self.p), 0)

    def _words(self, shape: tuple[int, ...]) -> threefry.Words:
        place = self._place
        if place is None:
            return self._draw(self._key, shape)
        key = threefry.fold_in(self._key, place.step)
        if self.masks == "example":
            positions = (place.first + np.arange(shape[0])) * place.world_size + place.rank
            return np.stack([self._draw(threefry.fold_in(key, int(position)), shape[1:]) for position in positions])
        key = threefry.fold_in(key, place.first)
        return self._draw(threefry.fold_in(key, place.rank) if self.masks == "replica" else key, shape)

    def _draw(self, key: threefry.Words, shape: tuple[int, ...]) -> threefry.Words:
        return threefry.bits(threefry.fold_in(key, self._calls), shape)


def dropout_layer(p: float, masks: str) -> nn.Module:
    """Return the Dropout layer of a model that has one; the identity if p is 0."""
    return Dropout(p, number=0, masks=masks) if p else nn.Identity()


def move_to(model: nn.Module, place: Place) -> None:
    """Set the place of the next forward pass in every Dropout layer of a model."""
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.move_to(place)
