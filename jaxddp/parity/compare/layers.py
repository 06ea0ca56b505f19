"""Find the first layer whose output differs between two forward passes."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxddp.parity.compare.residuals import norm
from jaxddp.parity.findings import Layer
from jaxddp.parity.records import INPUTS, OUTPUTS, StoredRecord, Tensors, relative

EQUAL = 1e-10  # ||jax - torch|| / ||torch|| of an output; measured: up to 3e-15


def first_difference(torch: StoredRecord, jax: StoredRecord, twins: dict[str, str]) -> tuple[Layer | None, int]:
    """Compare the layers that both sides call, in torch's order, and return the first that differs.

    Layers whose outputs have different shapes are skipped, such as attention heads before and after they are joined.
    A module that contains layers is skipped, too, if a later layer gets equal inputs or the enclosing module returns
    equal outputs: one side may add the residual connection inside of a block, and the other outside.

    Args:
        torch, jax: records with the stages "inputs" and "outputs", layer -> array, and the note "order", layers in
            the order in which their calls returned; jax's note "images" are those that it flattens (..., C).
        twins: torch's layers -> jax's.

    Returns:
        The layer, or None if no layer differs or none can be compared; and the number of equal layers before it.
    """
    order, images = torch.notes["order"], jax.notes.get("images", ())
    of_torch, of_jax = ((side[INPUTS], side[OUTPUTS]) for side in (torch, jax))
    before, equal, outer = "", 0, None
    for name, twin in _pairs(order, twins, of_torch, of_jax, images):
        call = _Call(name, twin, of_torch, of_jax, images)
        if call.moved is None:
            continue
        contains = any(_holds(name, other) for other in order)
        is_equal = call.residual <= EQUAL
        if is_equal if contains else call.is_given_same:
            outer = None
        if is_equal:
            before, equal = name, equal + 1
        elif not contains:
            return outer or (call.layer(before), equal)
        elif outer is None:
            outer = call.layer(before), equal
    return outer or (None, equal)


class _Call:
    """A call of a layer in both frameworks.

    Args:
        torch, jax: names.
        of_torch, of_jax: inputs and outputs of all calls.
        images: see `in_torch_layout`.

    Attributes:
        moved: jax's output in torch's layout; None if it has another shape.
    """

    def __init__(
        self,
        torch: str,
        jax: str,
        of_torch: tuple[Tensors, Tensors],
        of_jax: tuple[Tensors, Tensors],
        images: Sequence[Sequence[int]],
    ):
        self._torch, self._jax = torch, jax
        self._of_torch, self._of_jax = of_torch[1][torch], of_jax[1][jax]
        self.moved = in_torch_layout(self._of_jax, self._of_torch, images)
        self._received = _received(of_jax[0].get(jax), of_torch[0].get(torch), images)

    @property
    def residual(self) -> float:
        """||jax - torch|| / ||torch|| of the outputs."""
        assert self.moved is not None, "checked by first_difference"
        return _residual(self.moved, self._of_torch)

    @property
    def input_residual(self) -> float | None:
        """||jax - torch|| / ||torch|| of the inputs; None if unknown."""
        return None if self._received is None else _residual(*self._received)

    @property
    def is_given_same(self) -> bool:
        """Return whether the inputs are known and equal."""
        return self.input_residual is not None and self.input_residual <= EQUAL

    def layer(self, before: str) -> Layer:
        """Return the call as a `Layer`."""
        assert self.moved is not None, "checked by first_difference"
        element, values = _largest(self.moved, self._of_torch)
        return Layer(
            jax=self._jax,
            torch=self._torch,
            shapes=(self._of_jax.shape, self._of_torch.shape),
            element=element,
            values=values,
            residual=self.residual,
            input_residual=self.input_residual,
            before=before,
            columns=() if self._received is None else reordered(*self._received),
        )


def _holds(name: str, other: str) -> bool:
    """Return whether a call's layer contains another call's; the model, "", contains all others."""
    outer, inner = name.partition(" ")[0], other.partition(" ")[0]
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def layer_residuals(
    order: Sequence[str], torch: Tensors, jax: Tensors, twins: dict[str, str], images: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Compare the outputs of all layers; see `first_difference` and `in_torch_layout` for the arguments.

    Returns:
        Torch's calls, in order -> ||jax - torch|| / ||torch||.
    """
    residuals = {}
    for name, twin in _pairs(order, twins, ({}, torch), ({}, jax), images):
        of_jax = in_torch_layout(jax[twin], torch[name], images)
        if of_jax is not None:
            residuals[name] = _residual(of_jax, torch[name])
    return residuals


def not_finite_layer(side: StoredRecord) -> tuple[str, bool]:
    """Return the first layer whose output contains a NaN, or else an infinity; "" if there is none.

    Args:
        side: see `first_difference`.

    Returns:
        The layer, and whether its input contains one, too.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from jaxddp.parity.records import Records, RecordWriter
    >>> record = {INPUTS: {"fc": np.array([np.inf])}, OUTPUTS: {"fc": np.array([np.nan]), "": np.array([np.inf])}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     RecordWriter(Path(folder)).write(record, order=["fc", ""])
    ...     not_finite_layer(Records([Path(folder)])[0])
    ('fc', True)
    """
    inputs, outputs = side[INPUTS], side[OUTPUTS]
    for spoils in (np.isnan, np.isinf):
        for name in side.notes["order"]:
            if spoils(outputs[name]).any():
                return name, name in inputs and not np.isfinite(inputs[name]).all()
    return "", False


def in_torch_layout(jax: np.ndarray, torch: np.ndarray, images: Sequence[Sequence[int]] = ()) -> np.ndarray | None:
    """Return a jax activation in torch's layout: unchanged, or with the channels moved from last to second.

    If the shapes fit both layouts, as with as many channels as rows and columns, the one nearer to torch's values wins.

    Args:
        jax: activation of the jax layer.
        torch: activation of its torch twin.
        images: shapes (C, ...) of images that torch flattens in this order, and jax as (..., C).

    Returns:
        The activation; None if neither layout has torch's shape.

    >>> in_torch_layout(np.zeros((2, 5, 4, 3)), np.zeros((2, 3, 5, 4))).shape
    (2, 3, 5, 4)
    >>> in_torch_layout(np.zeros((2, 5)), np.zeros((2, 4))) is None
    True
    """
    layouts = [jax, np.moveaxis(jax, -1, 1)] if jax.ndim > 2 else [jax]
    for image in images:
        if jax.ndim == 2 and jax.shape[1] == np.prod(image):
            layouts.append(np.moveaxis(jax.reshape(-1, *image[1:], image[0]), -1, 1).reshape(jax.shape))
    possible = [x for x in layouts if x.shape == torch.shape]
    return min(possible, key=lambda x: _residual(x, torch), default=None)


def reordered(of_jax: np.ndarray, of_torch: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Find the permutation from torch's channels to jax's, as when two arrays are concatenated the other way round.

    Channels lie along the last axis, or the second of an image. Random projections over the other axes match the
    channels of the two sides; all elements are compared afterwards.

    Args:
        of_jax, of_torch: inputs of a layer, in torch's layout.

    Returns:
        Torch's channels in jax's order, as runs (first, last); empty if the order is torch's, or no order fits.

    >>> x = np.random.default_rng(0).normal(size=(4, 5))
    >>> reordered(x[:, [3, 4, 0, 1, 2]], x), reordered(x, x), reordered(x[:, [3, 4, 0, 1, 1]], x)
    (((3, 4), (0, 2)), (), ())
    """
    if of_torch.ndim < 2 or not (np.isfinite(of_jax).all() and np.isfinite(of_torch).all()):
        return ()
    axis = 1 if of_torch.ndim == 4 else -1
    columns = [np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for x in (of_jax, of_torch)]
    weights = np.random.default_rng(0).normal(size=len(columns[0]))
    jax_sums, torch_sums = (weights @ x for x in columns)
    order = np.empty(len(jax_sums), dtype=int)
    order[np.argsort(jax_sums, kind="stable")] = np.argsort(torch_sums, kind="stable")
    if _residual(*columns) <= EQUAL or _residual(columns[0], columns[1][:, order]) > EQUAL:
        return ()
    _lengthen_runs(order, torch_sums)
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    return tuple((int(run[0]), int(run[-1])) for run in runs)


def _lengthen_runs(order: np.ndarray, sums: np.ndarray) -> None:
    """Swap equal channels, such as dead ReLUs, in place, so that runs of neighbours become longer."""
    last = len(order) - 1
    for positions, step in ((range(1, last + 1), 1), (range(last - 1, -1, -1), -1)):
        for i in positions:
            wanted = order[i - step] + step
            if 0 <= wanted <= last and sums[wanted] == sums[order[i]]:
                other = np.flatnonzero(order == wanted)
                order[other], order[i] = order[i], wanted


def _pairs(
    order: Sequence[str],
    twins: dict[str, str],
    torch: tuple[Tensors, Tensors],
    jax: tuple[Tensors, Tensors],
    images: Sequence[Sequence[int]],
) -> Iterator[tuple[str, str]]:
    """Yield torch's calls with one of their twin's: of several, one with equal inputs, or else of the same number.

    The second call of a module is "fc (2)". `torch` and `jax` are inputs, as far as they are known, and outputs.
    """
    calls: dict[str, list[str]] = {}
    for name in jax[1]:
        calls.setdefault(name.partition(" ")[0], []).append(name)

    def are_equal(name: str, other: str) -> bool:
        shown = 0 if name in torch[0] and other in jax[0] else 1
        both = _received(jax[shown][other], torch[shown][name], images)
        return both is not None and _residual(*both) <= EQUAL

    for name in order:
        module, space, number = name.partition(" ")
        twin = twins.get(module, "?")
        same, left = twin + space + number, calls.get(twin, [])
        left.sort(key=lambda other: other != same)
        chosen = next((other for other in left if are_equal(name, other)), same)
        if chosen in left:
            left.remove(chosen)
            yield name, chosen


def _residual(of_jax: np.ndarray, of_torch: np.ndarray) -> float:
    return relative(float(np.linalg.norm(_distances(of_jax, of_torch))), norm(of_torch), norm(of_jax))


def _distances(of_jax: np.ndarray, of_torch: np.ndarray) -> np.ndarray:
    """Compute |jax - torch|: 0 where both are NaN or the same infinity, infinite where only one is."""
    with np.errstate(invalid="ignore"):
        distances = np.abs(of_jax - of_torch)
    same = (of_jax == of_torch) | (np.isnan(of_jax) & np.isnan(of_torch))
    return np.where(same, 0.0, np.where(np.isnan(distances), np.inf, distances))


def _received(
    of_jax: np.ndarray | None, of_torch: np.ndarray | None, images: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both inputs of a layer in torch's layout; None if they cannot be compared."""
    if of_jax is None or of_torch is None or (moved := in_torch_layout(of_jax, of_torch, images)) is None:
        return None
    return moved, of_torch


def _largest(of_jax: np.ndarray, of_torch: np.ndarray) -> tuple[tuple[int, ...], tuple[float, float]]:
    """Return the index of the largest difference, and both values there."""
    element = np.unravel_index(np.argmax(_distances(of_jax, of_torch)), of_torch.shape)
    return tuple(map(int, element)), (float(of_jax[element]), float(of_torch[element]))
