"""Reduce a step's gradients, correctly or with a mistake: micro-batch sums -> mean over replicas -> clipping."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxddp.parity.compare.clipping import NOT_CLIPPED, Clipping
from jaxddp.parity.diagnosis.micro_batches import MICRO_BATCH, weights
from jaxddp.parity.records import scaled_by

Tensors = Mapping[str, np.ndarray]
SHOWN = ("local_gradients", "gradients", "clipped_gradients")


@dataclass(frozen=True)
class ReductionStep:
    """Gradients of one step with W replicas and A micro-batches.

    Attributes:
        counts: sum of the weights of each micro-batch's elements, (W, A).
        sums: gradients of each micro-batch's summed loss, (W, A, ...).
        stale: these gradients at the parameters of the step before; None at the first step.
        shown: those stages of `SHOWN` that the port's step shows, (W, ...).
        beyond: norm of all gradients over that of the given ones, which may be excerpts.
        local_beyond: the same of each replica's gradients, (W,).
    """

    counts: np.ndarray
    sums: Tensors
    stale: Tensors | None
    shown: Mapping[str, Tensors]
    beyond: float = 1.0
    local_beyond: float | np.ndarray = 1.0


@dataclass(frozen=True)
class ReductionRecipe:
    """Reduction and clipping of a step's gradients; the defaults are torch DDP's.

    Attributes:
        over: range of the loss's mean, see `micro_batches.weights`.
        divide: the micro-batches' means are divided by their number.
        stale: gradients are taken at the parameters of the step before.
        early: the only micro-batches that are averaged over the replicas; None: all are.
        kept: the only micro-batch whose gradients are taken; None: all are.
        local_factor, factor: factors of the local and of the reduced gradients.
        summed_at_once: every replica's local gradient is the sum of all, as with shard_map's check_vma.
        synchronised: gradients are averaged over the replicas.
        weighted: each replica weighs as much as its elements in this average.
        wire: dtype between the replicas, see `wires.WIRES`.
        clipping: how gradients are clipped.
        clip_first: each replica clips its local gradients before they are averaged.
        clip_by: norm that clips: "mean", of the reduced gradients; "own", of the replica's local gradients; "tensor",
            of each tensor by itself.
        twice: tensor that the norm counts twice.
        aliases: (tensor, tensor whose gradient it has).
        not_averaged: tensors of which every replica keeps its own gradient.
    """

    over: str = MICRO_BATCH
    divide: bool = True
    stale: bool = False
    early: frozenset[int] | None = None
    kept: int | None = None
    local_factor: float = 1.0
    factor: float = 1.0
    summed_at_once: bool = False
    synchronised: bool = True
    weighted: bool = False
    wire: str = ""
    clipping: Clipping = NOT_CLIPPED
    clip_first: bool = False
    clip_by: str = "mean"
    twice: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    not_averaged: frozenset[str] = frozenset()

    def predict(self, step: ReductionStep) -> dict[str, dict[str, np.ndarray]]:
        """Return every stage of `SHOWN`, (W, ...)."""
        sums = step.sums if not self.stale or step.stale is None else step.stale
        micro = {name: self._of_micro_batches(value, step.counts) for name, value in sums.items()}
        if self.kept is not None:
            is_kept = np.arange(step.counts.shape[1]) == self.kept
            micro = {n: value * is_kept.reshape(-1, *(1,) * (value.ndim - 2)) for n, value in micro.items()}
        local = {name: self.local_factor * value.sum(1) for name, value in micro.items()}
        if self.summed_at_once:
            local = {name: len(value) * _everywhere(value) for name, value in local.items()}
        if self.early is not None:
            together = [a in self.early for a in range(step.counts.shape[1])]
            gradients = {
                n: _everywhere(v[:, together].sum(1)) + v[:, np.logical_not(together)].sum(1) for n, v in micro.items()
            }
        elif self.clip_first:
            gradients = self._reduced(self._clipped(local, local, step), step.counts)
        else:
            gradients = self._reduced(local, step.counts)
        gradients |= {name: gradients[other].reshape(gradients[name].shape) for name, other in self.aliases}
        clipped = gradients if self.clip_first else self._clipped(gradients, local, step)
        return {"local_gradients": local, "gradients": gradients, "clipped_gradients": clipped}

    def _of_micro_batches(self, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return each micro-batch's share of its replica's gradient, (W, A, ...)."""
        with np.errstate(divide="ignore", invalid="ignore"):  # a micro-batch without a label has the mean 0/0
            factors = weights(self.over, counts) * (1 if self.divide else counts.shape[1])
            return scaled_by(factors, sums)

    def _reduced(self, local: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
        kept = self.not_averaged if self.synchronised else local.keys()
        shares = counts.sum(1) * (len(counts) / counts.sum()) if self.weighted else np.ones(len(counts))
        return {
            name: self.factor * (x if name in kept else _everywhere(scaled_by(shares, x), self.wire))
            for name, x in local.items()
        }

    def _clipped(
        self, gradients: dict[str, np.ndarray], local: dict[str, np.ndarray], step: ReductionStep
    ) -> dict[str, np.ndarray]:
        if self.clip_by == "tensor":
            whole = replace(self, clip_by="mean")
            return {name: whole._clipped({name: value}, {}, step)[name] for name, value in gradients.items()}
        of_replicas = self.clip_by == "own" or self.clip_first or not self.synchronised
        norms = _norms(local if self.clip_by == "own" else gradients, self.twice)
        share = self.clipping.factor((step.local_beyond if of_replicas else step.beyond) * norms)
        scaled = {name: scaled_by(share, value) for name, value in gradients.items()}
        return {name: self.clipping.by_value(value) for name, value in scaled.items()}

    def with_clipping(self, **fields: Any) -> "ReductionRecipe":
        """Return the recipe with other fields of its clipping."""
        return replace(self, clipping=replace(self.clipping, **fields))


def _everywhere(local: np.ndarray, wire: str = "") -> np.ndarray:
    """Compute the mean over the replicas, repeated for each of them."""
    return np.broadcast_to(mean_of(local, wire), local.shape)


def _norms(gradients: Mapping[str, np.ndarray], twice: str) -> np.ndarray:
    """Return each replica's global norm, (W,)."""
    squares = [
        (2 if name == twice else 1) * np.square(value).reshape(len(value), -1).sum(1)
        for name, value in gradients.items()
    ]
    return np.sqrt(np.sum(squares, axis=0))


_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# Dtype on the wire, precision of the sum, precision of the division: "wire" or "wide".
WIRES = tuple(
    f"{dtype},{summed},{divided}" for dtype in _DTYPES for summed in ("wire", "wide") for divided in ("wire", "wide")
)


def mean_of(local: np.ndarray, wire: str = "") -> np.ndarray:
    """Return the mean over the first axis, (1, ...).

    Args:
        local: values of W replicas, (W, ...).
        wire: one of `WIRES`; "": the array's dtype throughout.

    >>> mean_of(np.array([[1.0], [1.001]]), "bfloat16,wide,wide")
    array([[1.]])
    """
    if not wire:
        return local.mean(0, keepdims=True)
    name, summed, divided = wire.split(",")
    dtype = _DTYPES[name]
    sent = local.astype(np.float32).astype(dtype)
    if summed == "wide":
        total = sent.astype(np.float32).sum(0, keepdims=True)
    else:
        total = sent[:1]
        for other in sent[1:]:
            total = (total + other[None]).astype(dtype)
    if divided == "wire":
        return (total.astype(dtype) / dtype(len(local))).astype(dtype).astype(local.dtype)
    return total.astype(local.dtype) / len(local)
