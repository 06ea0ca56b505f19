"""Outputs of a layer: which rows of a torch tensor are a part of it, and which of a jax array are each layer's."""

import itertools
from dataclasses import dataclass

import numpy as np
from torch import nn

from jaxddp.errors import listed
from jaxddp.parity.convert.entries import NoTwinError
from jaxddp.parity.convert.layouts import Shape, word_for_outputs
from jaxddp.parity.port.rules import Rule

Index = tuple[slice | np.ndarray, ...]  # (): everything


@dataclass(frozen=True)
class Target:
    """A torch tensor, or some of its outputs.

    Attributes:
        name: name of the tensor.
        module: module that it belongs to.
        shape: shape of the outputs that are meant.
        axis: axis of the outputs.
        rows: numbers of these outputs; None: all.
    """

    name: str
    module: nn.Module | None
    shape: Shape
    axis: int
    rows: np.ndarray | None = None

    def part(self, rows: np.ndarray) -> "Target":
        """Return some of these outputs, counted within them."""
        shape = (*self.shape[: self.axis], len(rows), *self.shape[self.axis + 1 :])
        return Target(self.name, self.module, shape, self.axis, rows if self.rows is None else self.rows[rows])


def rows_of_part(rule: Rule, target: Target) -> np.ndarray:
    """Return the outputs of a layer that are a part."""
    assert rule.part is not None
    size, outputs = target.shape[target.axis], word_for_outputs(target.module)
    if isinstance(rule.of, tuple):
        if sum(rule.of) != size:
            raise NoTwinError(f"torch's {target.name} has {size} {outputs}, the parts have {sum(rule.of)}")
        first = sum(rule.of[: rule.part])
        return np.arange(first, first + rule.of[rule.part])
    heads = rule.heads or 1
    if size % (rule.of * heads):
        parts = f"{rule.of} parts" if heads == 1 else f"{rule.of} parts of {heads} heads"
        raise NoTwinError(f"torch's {target.name} has {size} {outputs}, which are not {parts}")
    return np.arange(size).reshape(heads, rule.of, -1)[:, rule.part].ravel()


def outputs_of_each(rule: Rule, sizes: list[int]) -> list[np.ndarray | None]:
    """Return the outputs of a fused layer that are each torch layer's."""
    outputs = np.arange(sum(sizes))
    if rule.heads is None:
        return [*np.split(outputs, np.cumsum(sizes)[:-1])]
    if len({*sizes}) > 1 or sizes[0] % rule.heads:
        counts = ", ".join(map(str, sizes))
        raise NoTwinError(f"torch's layers have {counts} outputs; must be equal parts of {rule.heads} heads")
    return [*outputs.reshape(rule.heads, len(sizes), -1).swapaxes(0, 1).reshape(len(sizes), -1)]


def index_of(rows: np.ndarray | None, axis: int) -> Index:
    """Return the index of some outputs; a slice where they are one after another."""
    if rows is None:
        return ()
    first = int(rows[0]) if len(rows) else 0
    straight = np.array_equal(rows, np.arange(first, first + len(rows)))
    return (*[slice(None)] * axis, slice(first, first + len(rows)) if straight else rows)


def text_of(index: Index) -> str:
    """Return the text of some outputs.

    >>> text_of((np.array([0, 1, 6, 7]),)), text_of((slice(None), slice(4, 8))), text_of(())
    ('[0:2, 6:8]', '[4:8]', '')
    """
    if not index:
        return ""
    last = index[-1]
    if isinstance(last, slice):
        return f"[{last.start}:{last.stop}]"
    return f"[{runs(last)}]"


def runs(numbers: np.ndarray) -> str:
    """Return ascending numbers as ranges.

    >>> runs(np.array([0, 1, 6, 7]))
    '0:2, 6:8'
    """
    groups = itertools.groupby(enumerate(numbers.tolist()), key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in groups]
    return listed([f"{one[0]}:{one[-1] + 1}" for one in ranges], joint=", ")
