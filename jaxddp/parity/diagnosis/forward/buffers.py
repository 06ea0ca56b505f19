"""Causes of a difference in the buffers: how BatchNorm updates its statistics, and which replica's are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.forward.call_changes import batch_norm_sync, biased_variance, momentum
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit
from jaxddp.parity.diagnosis.forward.fault_lines import lines_of_items
from jaxddp.parity.diagnosis.forward.loss_causes import FLOOR, replays_of
from jaxddp.parity.diagnosis.forward.replay import Arrays, ModelEvidence, Replay
from jaxddp.parity.diagnosis.forward.sites import patches_of
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.search.fault_search import find_faults
from jaxddp.parity.diagnosis.search.fit import Item, Scaling, Stages, residual_at


@dataclass(frozen=True, kw_only=True)
class KeptBuffers(Scaling):
    """Wrong buffers that a replica keeps after a step.

    Attributes:
        mean: whether the mean over the replicas is kept; False: each replica keeps its own.
    """

    mean: bool

    def excludes(self, other: object) -> bool:
        """Return whether the other fault is a way to keep buffers, too."""
        return isinstance(other, KeptBuffers)


OWN = KeptBuffers(known=(Deviation("buffers_local", Statement("buffers_local")),), mean=False)
MEAN = KeptBuffers(known=(Deviation("buffers_averaged", Statement("buffers_averaged")),), mean=True)


def explain_buffers(evidence: ModelEvidence, known: Sequence[Item] = ()) -> Ruling:
    """Name the faults that make JAX's buffers differ from the reference's.

    Args:
        evidence: see `search_model`.
        known: faults already named, planted in every replay.

    Returns:
        The ruling. Nothing is named and there is no runner-up if the buffers do not differ, apart from
        the effect of the known faults.
    """
    subject = Buffers(evidence, known)
    for step in range(subject.steps):
        if residual_at(subject, (step, subject.ranks)) > FLOOR:
            calls = subject.calls(step)
            replays = replays_of(calls)
            ruling, named = find_faults(subject, subject.items(calls), (step, subject.ranks), FLOOR, replays)
            if not named or evidence.reading is None or not evidence.reading.program:
                return ruling
            return replace(ruling, lines=lines_of_items(subject, evidence.reading, named, evidence.made))
    return Ruling((), None)


class Buffers:
    """Change of the buffers in each step, a `fit.Subject`.

    Args:
        evidence: the reference's loss, and JAX's steps.
        known: faults planted in every replay.
    """

    def __init__(self, evidence: ModelEvidence, known: Sequence[Item] = ()):
        self._known = [item for item in known if isinstance(item, CallEdit)]
        self.steps = len(evidence.steps)
        self.ranks = tuple(range(evidence.world_size))
        self._evidence = evidence
        self._replay = Replay(evidence)

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the change of replica 0's buffers, and of those that differ between the replicas."""
        taken = self._evidence.steps[step]
        of_ranks = {name: value[list(ranks)] for name, value in taken.all_buffers.items()}
        return {"buffers": _changes(taken.buffers, taken.state), "all_buffers": _changes(of_ranks, taken.state)}

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the change of the reference's buffers with faults planted."""
        patches = [*self._known, *(item for item in items if isinstance(item, CallEdit))]
        kept = next((item for item in items if isinstance(item, KeptBuffers)), None)
        run = self.ranks if kept else (0,)
        buffers = [result.buffers for result in self._replay.run(step, run, patches)]
        if kept and kept.mean:
            buffers = [{name: np.mean([one[name] for one in buffers], 0) for name in buffers[0]}] * len(run)
        state = self._evidence.steps[step].state
        of_ranks = {name: np.stack([buffers[rank if kept else 0][name] for rank in ranks]) for name in buffers[0]}
        return {"buffers": _changes(buffers[0], state), "all_buffers": _changes(of_ranks, state)}

    def calls(self, step: int, rank: int = 0, patches: Sequence[CallEdit] = (), reads: bool = False) -> list[Call]:
        """Return the calls of the loss, with faults planted; see `sites.trace`."""
        return self._replay.trace(step, rank, [*self._known, *patches], reads)

    def items(self, calls: Sequence[Call]) -> list[Item]:
        """Return all faults that apply to the BatchNorm layers that the loss calls."""
        kinds = (momentum, biased_variance, *((batch_norm_sync,) if len(self.ranks) > 1 else ()))
        changes = [(call, change) for kind in kinds for call in calls for change in kind(call)]
        return [*((OWN, MEAN) if len(self.ranks) > 1 else ()), *patches_of(changes)]


def _changes(buffers: Arrays, state: Arrays) -> dict[str, np.ndarray]:
    """Return the change of each floating-point buffer since before the step."""
    return {name: value - state[name] for name, value in buffers.items() if value.dtype.kind == "f"}
