"""Changes of calls that move values to other places: padding, flattened axes, kernels."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.answers import with_argument
from jaxddp.parity.diagnosis.forward.calls import Call, Change, Proceed

RESHAPES = ("flatten", "reshape", "view", "unflatten")
MOST_AXES = 3  # more flattened axes have too many orders to try


def same_padding(call: Call) -> Iterator[Change]:
    """Yield a convolution or pooling padded as XLA's 'SAME' pads, with the larger half at the end.

    An axis of n values, with stride s and a kernel that spans k, gets
    p = max((ceil(n / s) - 1) s + k - n, 0) more values, p // 2 of them at the start.
    """
    kind = call.name[:-2]
    if kind not in ("conv", "max_pool", "avg_pool") or isinstance(call.get("padding"), str):
        return
    symmetric = [number for padding in _each(call, call.get("padding", 0)) for number in (padding, padding)]
    if _same(call) != symmetric:

        def answer(call: Call, proceed: Proceed, value: float) -> Any:
            # The call may be another layer of the group.
            fill = -math.inf if call.name.startswith("max_pool") else 0.0
            pads = _same(call)
            last_axis_first = [number for axis in range(len(pads) - 2, -1, -2) for number in pads[axis : axis + 2]]
            return proceed(call.but(input=F.pad(call.get("input"), last_axis_first, value=fill), padding=0))

        group = Statement("same_padding", kind="", pads=())
        what = group.but(kind=kind, pads=tuple(_same(call)))
        yield Change("same_padding", what, answer, group=group, subsets=True)


def _same(call: Call) -> list[int]:
    """Return the padding before and after each spatial axis."""
    sizes = call.get("input").shape[-int(call.name[-2]) :]
    if call.name.startswith("conv"):
        spans = [
            (size - 1) * dilation + 1
            for size, dilation in zip(call.get("weight").shape[2:], _each(call, call.get("dilation", 1)), strict=True)
        ]
        strides = _each(call, call.get("stride", 1))
    else:
        spans = _each(call, call.get("kernel_size"))
        strides = spans if call.get("stride") in (None, []) else _each(call, call.get("stride"))
    pads = []
    for n, span, stride in zip(sizes, spans, strides, strict=True):
        missing = max((math.ceil(n / stride) - 1) * stride + span - n, 0)
        pads += [missing // 2, missing - missing // 2]
    return pads


def _each(call: Call, option: int | Sequence[int]) -> list[int]:
    """Return a layer's option for each spatial axis."""
    dims = int(call.name[-2])
    values = [option] if isinstance(option, int) else list(option)
    return values * dims if len(values) == 1 else values


def flattened_axes(call: Call) -> Iterator[Change]:
    """Yield axes merged, or an axis split, in another order: (C, H, W) as (H, W, C)."""
    if call.name not in RESHAPES or not isinstance(call.result, Tensor):
        return
    before, after = tuple(call.args[0].shape), tuple(call.result.shape)
    for old, new in _groups(before, after):
        if len(new) == 1:
            yield from (_merged(order) for order in _orders(old, before))
            if len(before) == 4 and old == [2, 3] and before[1] > 1 < before[2]:
                yield _merged((0, 2, 1, 3))  # heads that are not moved back before they are joined
        elif len(old) == 1:
            yield from (_split(order) for order in _orders(new, after))


def _merged(order: Sequence[int]) -> Change:
    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        return call.args[0].permute(tuple(order)).reshape(call.run().shape)

    return Change("layout", Statement("axes_merged", order=tuple(order)), answer)


def _split(order: Sequence[int]) -> Change:
    def answer(call: Call, proceed: Proceed, value: float) -> Any:
        shape = call.run().shape
        back = [order.index(axis) for axis in range(len(order))]
        return call.args[0].reshape([shape[axis] for axis in order]).permute(back)

    return Change("layout", Statement("axis_split", order=tuple(order)), answer)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield groups of axes that a reshape maps to each other: (8, 3, 4) to (8, 12) is [0] -> [0], [1, 2] -> [1].

    A scalar, and an array without elements, have none.

    >>> list(_groups((8, 3, 4), (8, 12)))
    [([0], [0]), ([1, 2], [1])]
    >>> list(_groups((), (1,))), list(_groups((2, 0), (0, 2)))
    ([], [])
    """
    if not (before and after and math.prod(before)):
        return
    old, new = [0], [0]
    while True:
        sizes = math.prod(before[axis] for axis in old), math.prod(after[axis] for axis in new)
        if sizes[0] < sizes[1]:
            old.append(old[-1] + 1)
        elif sizes[0] > sizes[1]:
            new.append(new[-1] + 1)
        else:
            yield old, new
            old, new = [old[-1] + 1], [new[-1] + 1]
            if old[0] >= len(before) or new[0] >= len(after):
                return


def _orders(axes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield other orders of the axes that have more than one element."""
    long = [axis for axis in axes if shape[axis] > 1]
    if len(long) <= MOST_AXES:
        for order in list(itertools.permutations(long))[1:]:
            moved = dict(zip(long, order, strict=True))
            yield tuple(moved.get(axis, axis) for axis in range(len(shape)))


def kernel_axes(call: Call) -> Iterator[Change]:
    """Yield a kernel with two axes of equal size swapped, or flipped."""
    if call.name not in ("linear", "conv1d", "conv2d", "conv3d"):
        return
    shape = call.get("weight").shape
    for first, second in [(0, 1), *itertools.combinations(range(2, len(shape)), 2)]:
        if shape[first] == shape[second] > 1:
            what = Statement("kernel_swapped", axes=(first, second))
            yield _kernel(what, partial(Tensor.transpose, dim0=first, dim1=second))
    turned = tuple(axis for axis in range(2, len(shape)) if shape[axis] > 1)
    if turned:
        yield _kernel(Statement("kernel_turned", axes=turned), partial(Tensor.flip, dims=turned))


def _kernel(what: Statement, other: Callable[[Tensor], Tensor]) -> Change:
    return Change("layout", what, with_argument("weight", other))
