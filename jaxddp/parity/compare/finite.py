"""Find a run's first non-finite values on either side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxddp.errors import listed
from jaxddp.parity.case_interface import LOCAL_STAGES
from jaxddp.parity.compare.judge import MOMENTUM, STATES
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.records import Record, Tensors

STAGES = (*LOCAL_STAGES, "gradients", "clipped_gradients", "update", "buffers", "optimizer_state")
GRADIENTS = ("local_gradients", "gradients", "clipped_gradients")
NAMED = 3  # tensors listed
Places = dict[tuple[str, int], None]  # (tensor, replica), in order; replica 0 for a shared stage


@dataclass(frozen=True)
class NotFinite:
    """First non-finite values of a run.

    Attributes:
        step: first step with any, counted from 0.
        stage: first stage of that step with any.
        side: "torch" or "jax"; "both" if they are at the same place on both sides.
        tensors: tensors that contain any.
        all_tensors: whether every tensor of the stage contains some.
        rank: first replica with any.
    """

    step: int
    stage: str
    side: str
    tensors: tuple[str, ...]
    all_tensors: bool
    rank: int

    @property
    def where(self) -> str:
        """Names of the tensors, for a message.

        >>> NotFinite(0, "update", "both", ("a", "b", "c", "d"), False, 0).where
        'a, b, c, ...'
        """
        return "all tensors" if self.all_tensors and len(self.tensors) > 1 else listed(self.tensors, NAMED, ", ")


def first_not_finite(torch: Sequence[Record], jax: Sequence[Record], start: Arrays) -> NotFinite | None:
    """Return the first non-finite values in the stages that both sides show; None if all are finite.

    Constants of the model, such as a mask that holds -inf from the start, do not count. Neither do gradients that both
    sides skip so that the parameters stay finite, like a loss scaler.

    Args:
        torch, jax: records of both sides.
        start: buffers before the first step.

    >>> torch, jax = ({"gradients": {"a": np.array([x])}, "update": {"a": np.zeros(1)}} for x in (1.0, np.inf))
    >>> first_not_finite([torch], [jax], {})
    NotFinite(step=0, stage='gradients', side='jax', tensors=('a',), all_tensors=True, rank=0)
    """
    for step, (torch_record, jax_record) in enumerate(zip(torch, jax, strict=False)):
        skipped = not _places(torch_record, "update", start)
        for stage in STAGES:
            if not _of_stage(torch_record, stage) or not _of_stage(jax_record, stage):
                continue
            of_torch, of_jax = (_places(record, stage, start) for record in (torch_record, jax_record))
            both = {place: None for place in of_torch if place in of_jax}
            if both and skipped and stage in GRADIENTS:
                continue
            if found := both or of_jax or of_torch:
                side = "both" if both else "jax" if of_jax else "torch"
                tensors = tuple(dict.fromkeys(name for name, _ in found))
                count = len({name for name, _ in _of_stage(jax_record if side == "jax" else torch_record, stage)})
                return NotFinite(step, stage, side, tensors, len(tensors) == count, min(rank for _, rank in found))
    return None


def _places(record: Record, stage: str, start: Arrays) -> Places:
    """Return where a stage has non-finite values."""
    found: Places = {}
    for name, x in _of_stage(record, stage):
        spoils = ~np.isfinite(x)
        if stage == "buffers" and spoils.any() and name in start:
            spoils &= np.isfinite(start[name])
        ranks = np.flatnonzero(spoils.reshape(len(x), -1).any(1)) if stage in LOCAL_STAGES else [0] * bool(spoils.any())
        found |= {(name, int(rank)): None for rank in ranks}
    return found


def _of_stage(record: Record, stage: str) -> list[tuple[str, np.ndarray]]:
    """Return a stage's floating-point tensors, and the norms of large ones, whose tensors are excerpts."""
    of_record: list[Tensors] = [record.get(stage, {}), record.get(f"pure_{stage}", {})]
    if stage in GRADIENTS:
        norms = record.get("local_norms" if stage in LOCAL_STAGES else "norms", {})
        of_record.append({key.partition(":")[2]: x for key, x in norms.items() if key.partition(":")[0] == stage})
    tensors = [(name, x) for of_stage in of_record for name, x in of_stage.items() if x.dtype.kind == "f"]
    return tensors if stage != "optimizer_state" else [*_compared_states(tensors)]


def _compared_states(tensors: list[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the states that both optimizers have, named after their parameters."""
    known = {*STATES, *chain(*STATES.values()), *MOMENTUM, "momentum_buffer"}
    for key, x in tensors:
        kind, _, name = key.partition(":")
        if kind in known and name:
            yield name, x
