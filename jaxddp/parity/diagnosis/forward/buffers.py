"""Causes of a difference in the buffers: how BatchNorm moves its statistics, and whose buffers are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.diagnosis.decide import Ruling
from jaxddp.parity.diagnosis.forward.calls import Edit
from jaxddp.parity.diagnosis.forward.explain import FLOOR
from jaxddp.parity.diagnosis.forward.fit import Item, Stages, residual_at
from jaxddp.parity.diagnosis.forward.functions import batch_norm_sync, biased_variance, momentum
from jaxddp.parity.diagnosis.forward.replay import Arrays, ModelEvidence, Replay
from jaxddp.parity.diagnosis.forward.search import explain
from jaxddp.parity.diagnosis.forward.sites import edits_of


@dataclass(frozen=True)
class Kept:
    """Whose buffers a replica has after a step."""

    what: str
    mean: bool
    faults: tuple[str, ...]
    reference: None = None
    start: float = 0.0
    value: None = None
    plausible: bool = True

    @property
    def says(self) -> str:
        """The fault in words."""
        return self.what

    def at(self, value: float) -> "Kept":
        """There is no value."""
        return self

    def excludes(self, other: object) -> bool:
        """There is one way to keep them."""
        return isinstance(other, Kept)


OWN = Kept("each replica keeps its own buffers, the reference those of rank 0", False, ("buffers_local",))
MEAN = Kept("the buffers are the mean over the replicas, the reference keeps rank 0's", True, ("buffers_averaged",))


def explain_buffers(
    evidence: ModelEvidence, floor: float = FLOOR, seconds: float = 30.0, known: Sequence[Item] = ()
) -> Ruling:
    """Name what makes JAX's buffers differ from the reference's.

    Args:
        evidence, floor, seconds: as of `search_model`.
        known: faults that the port has besides, and what follows from them.

    Returns:
        The ruling; nothing named and no runner-up where nothing differs, but for what is known.
    """
    subject = Buffers(evidence, known)
    for step in range(subject.steps):
        if residual_at(subject, (step, subject.ranks)) > floor:
            return explain(subject, subject.items(step), (step, subject.ranks), floor, seconds)[0]
    return Ruling((), None)


class Buffers:
    """The change of the buffers in a step, as `variants_search` takes its subject."""

    def __init__(self, evidence: ModelEvidence, known: Sequence[Item] = ()):
        self._known = [item for item in known if isinstance(item, Edit)]
        self.steps = len(evidence.steps)
        self.ranks = tuple(range(evidence.world_size))
        self._evidence = evidence
        self._replay = Replay(evidence)

    def found(self, step: int, ranks: Sequence[int]) -> Stages:
        """What JAX did: to replica 0's, and to those that differ, of some replicas."""
        taken = self._evidence.steps[step]
        everyones = {name: value[list(ranks)] for name, value in taken.all_buffers.items()}
        return {"buffers": _changes(taken.buffers, taken.state), "all_buffers": _changes(everyones, taken.state)}

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """What the reference does, with faults."""
        edits = [*self._known, *(item for item in items if isinstance(item, Edit))]
        kept = next((item for item in items if isinstance(item, Kept)), None)
        run = self.ranks if kept else (0,)
        buffers = [found.buffers for found in self._replay.run(step, run, edits)]
        if kept and kept.mean:
            buffers = [{name: np.mean([one[name] for one in buffers], 0) for name in buffers[0]}] * len(run)
        state = self._evidence.steps[step].state
        everyones = {name: np.stack([buffers[rank if kept else 0][name] for rank in ranks]) for name in buffers[0]}
        return {"buffers": _changes(buffers[0], state), "all_buffers": _changes(everyones, state)}

    def items(self, step: int) -> list[Item]:
        """All faults that apply to the BatchNorm layers that the loss really calls."""
        calls = self._replay.trace(step, rank=0)
        kinds = (momentum, biased_variance, *((batch_norm_sync,) if len(self.ranks) > 1 else ()))
        changes = [(call, change) for kind in kinds for call in calls for change in kind(call)]
        return [*((OWN, MEAN) if len(self.ranks) > 1 else ()), *edits_of(changes)]


def _changes(buffers: Arrays, state: Arrays) -> dict[str, np.ndarray]:
    """Of the buffers that are real numbers, since before the step."""
    return {name: value - state[name] for name, value in buffers.items() if value.dtype.kind == "f"}
