"""Bring stages of a JAX recording into the names and layouts of a torch recording.

All maps between the two only permute elements. The positions of JAX's elements are converted as the arrays themselves
would be, which tells for each element that torch has kept where JAX has kept it, if it has.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.convert import Converter
from jaxddp.parity.convert.pieces import Piece
from jaxddp.parity.projections import size_of
from jaxddp.parity.recorder.excerpt_grid import positions
from jaxddp.parity.recordings.run import RecordedStep, Recording
from jaxddp.parity.records import Tensors, relative

BETWEEN = "|"
SUMMING = 1e-13  # of a parameter's norm, which an update loses if its projections are a difference; measured: 2e-14


@dataclass(frozen=True)
class _Twin:
    """Elements of a torch tensor that both sides have kept.

    Attributes:
        arrays: JAX's arrays that hold the tensor's elements.
        index: place of each element among those kept of these arrays, one array after the other.
        of_torch: place of each element among those kept of the tensor.
        shape: shape of the result: the tensor's, or (elements, 1, ...) for an excerpt.
        is_only: the arrays hold only this tensor, so that their norm is the tensor's.
        is_permuted: it is one array with the tensor's axes in some order, so that its projections are the tensor's.
    """

    arrays: tuple[str, ...]
    index: np.ndarray
    of_torch: np.ndarray
    shape: tuple[int, ...]
    is_only: bool
    is_permuted: bool


class Alignment:
    """The elements that both sides have kept, tensor by tensor.

    Args:
        converter: pairs the arrays.
        torch_run, jax_run: the recordings.

    Attributes:
        twins: torch's tensors, tied ones under their first name.
        uncovered: tensors whose excerpts share no element.
    """

    def __init__(self, converter: Converter, torch_run: Recording, jax_run: Recording):
        self._limits = torch_run.limit, jax_run.limit
        self._shapes = jax_run.shapes
        self._permuted = {piece.jax for piece in converter.pieces if _only_permutes(piece)}
        self.twins: dict[str, _Twin] = {}
        for arrays, tensors in _groups(converter):
            self.twins |= self._of_group(converter, arrays, tensors, torch_run.shapes)
        self.uncovered = sorted(name for name, twin in self.twins.items() if not twin.index.size)
        for name in self.uncovered:
            del self.twins[name]
        # torch's own order, in which tables and reports list the tensors
        self.twins = {name: self.twins[name] for name in torch_run.shapes if name in self.twins}

    def _of_group(
        self, converter: Converter, arrays: Sequence[str], tensors: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, _Twin]:
        starts = np.cumsum([1, *(math.prod(self._shapes[name]) for name in arrays)])
        every = {
            name: np.arange(start, start + math.prod(self._shapes[name]), dtype=np.int64).reshape(self._shapes[name])
            for name, start in zip(arrays, starts, strict=False)
        }
        converted = converter.to_torch(every)
        kept = [positions(self._shapes[n], self._limits[1]).ravel() + s for n, s in zip(arrays, starts, strict=False)]
        places = np.concatenate(kept)
        twins, tensors = {}, [*tensors]
        for name in tensors:
            shape = shapes[name]
            wanted = np.asarray(converted[name]).ravel()[positions(shape, self._limits[0]).ravel()]
            found = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
            (of_torch,) = np.nonzero(places[found] == wanted)
            full = len(of_torch) == math.prod(shape)
            as_shape = shape if full else (len(of_torch), *(1,) * (len(shape) - 1))
            kinds = len(tensors) == 1, len(tensors) == len(arrays) == 1 and arrays[0] in self._permuted
            twins[name] = _Twin(tuple(arrays), found[of_torch], of_torch, as_shape, *kinds)
        return twins

    def of_jax(self, stage: Tensors) -> Tensors:
        """Return JAX's elements of a stage under torch's names; tensors that the stage lacks are left out.

        Args:
            stage: JAX's arrays, with or without a leading axis of replicas.
        """
        found = {}
        for name, twin in self.twins.items():
            if all(array in stage for array in twin.arrays):
                axes = [x.ndim - len(self._shapes[n]) for n, x in ((n, stage[n]) for n in twin.arrays)]
                replicas = stage[twin.arrays[0]].shape[: axes[0]]
                flat = np.concatenate([stage[n].reshape((*replicas, -1)) for n in twin.arrays], axis=-1)
                found[name] = flat[..., twin.index].reshape((*replicas, *twin.shape))
        return found

    def of_torch(self, stage: Tensors, axes: int = 0) -> Tensors:
        """Return torch's elements of a stage that JAX has too.

        Args:
            stage: torch's tensors.
            axes: number of leading axes, 1 for a local stage.
        """
        found = {}
        for name, x in stage.items():
            if (twin := self.twins.get(name)) is not None:
                replicas = x.shape[:axes]
                found[name] = x.reshape((*replicas, -1))[..., twin.of_torch].reshape((*replicas, *twin.shape))
        return found

    def states_of_jax(self, stage: Tensors) -> Tensors:
        """Return the optimizer's state under torch's names of the parameters: "mu:0.weight"."""
        return _by_kind(stage, self.of_jax)

    def states_of_torch(self, stage: Tensors) -> Tensors:
        """Return torch's optimizer state, of the elements that JAX has too."""
        return _by_kind(stage, self.of_torch)

    def norms_of_jax(self, step: RecordedStep, stage: str) -> dict[str, float]:
        """Return the norms of whole tensors that JAX's arrays show, under torch's names."""
        shown, norms = step[stage], step["norms"]
        found = {}
        for name, twin in self.twins.items():
            if twin.is_only and all(array in shown for array in twin.arrays):
                found[name] = math.hypot(*(_norm(stage, array, shown, norms) for array in twin.arrays))
        return found

    def unprojected(self) -> list[str]:
        """Return the tensors without projections to compare, which JAX has fused, stacked or reshaped."""
        return [name for name, twin in self.twins.items() if not twin.is_permuted]

    def projections_apart(self, torch: RecordedStep, jax: RecordedStep, stage: str) -> dict[str, float]:
        """Return by how much the projections of whole tensors differ, relative to the norm of all tensors."""
        shown, whole, of_jax = torch[stage], torch["projections"], jax["projections"]
        keys = {name: f"{stage}{BETWEEN}{name}" for name in shown}
        norms = {key: np.asarray(size_of(x)) for key, x in whole.items()}
        sizes = {name: _norm(stage, name, shown, norms) for name in shown}
        params = {name: size_of(whole.get(f"params{BETWEEN}{name}", np.zeros(1))) for name in shown}
        scale, apart = math.hypot(*sizes.values()), {}
        for name, twin in self.twins.items():
            key = f"{stage}{BETWEEN}{twin.arrays[0]}"
            if twin.is_permuted and keys.get(name) in whole and key in of_jax and np.isfinite(whole[keys[name]]).all():
                rounding = SUMMING * params[name] if stage == "update" else 0.0
                apart[name] = relative(max(0.0, size_of(of_jax[key] - whole[keys[name]]) - rounding), scale)
        return apart


def _only_permutes(piece: Piece) -> bool:
    """Return whether an array is a tensor with its axes in some order, none of them reversed, split or merged."""
    part = piece.place or piece.jax_outputs or piece.torch_outputs or piece.summand
    return not part and len(piece.torch_shape) == len(piece.layouts.axes)


def total_norm(step: RecordedStep, stage: str) -> float:
    """Return the norm of all tensors of a stage; excerpts count as their whole tensors."""
    shown, norms = step[stage], step["norms"]
    return math.hypot(*(_norm(stage, name, shown, norms) for name in shown))


def norms_of_torch(step: RecordedStep, stage: str) -> dict[str, float]:
    """Return the norm of each tensor of a stage."""
    shown, norms = step[stage], step["norms"]
    return {name: _norm(stage, name, shown, norms) for name in shown}


def _norm(stage: str, name: str, shown: Tensors, norms: Tensors) -> float:
    noted = norms.get(f"{stage}{BETWEEN}{name}")
    return float(noted) if noted is not None else float(np.linalg.norm(shown[name].astype(float)))


def _by_kind(stage: Tensors, align: Callable[[Tensors], Tensors]) -> Tensors:
    kinds: dict[str, Tensors] = {}
    for key, x in stage.items():
        kind, _, name = key.partition(":")
        kinds.setdefault(kind, {})[name] = x
    return {f"{kind}:{n}": x for kind, of_kind in kinds.items() for n, x in align(of_kind).items()}


def _groups(converter: Converter) -> list[tuple[list[str], list[str]]]:
    """Return the smallest groups of JAX's arrays and torch's tensors that hold the same elements."""
    of_torch: dict[str, set[str]] = {}
    for piece in (one for one in converter.pieces if one.summand is None):
        of_torch.setdefault(converter.tied.get(piece.torch, piece.torch), set()).add(piece.jax)
    groups: list[tuple[set[str], list[str]]] = []
    for tensor, arrays in of_torch.items():
        joined, tensors = set(arrays), [tensor]
        for other in [group for group in groups if group[0] & arrays]:
            groups.remove(other)
            joined, tensors = joined | other[0], [*other[1], *tensors]
        groups.append((joined, tensors))
    return [(sorted(arrays), tensors) for arrays, tensors in groups]
