"""Causes of a difference in the forward and backward pass: faults in the loss, or in combining micro-batches."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from jaxddp.parity.diagnosis.forced.causes import LocatedFault, located_faults
from jaxddp.parity.diagnosis.forced.forced_values import OtherInputs
from jaxddp.parity.diagnosis.forced.gradients import gradient_faults
from jaxddp.parity.diagnosis.forced.labels import Changes, Edits
from jaxddp.parity.diagnosis.forward.call_changes import (
    batch_norm_eval,
    batch_norm_sync,
    chosen_term,
    clamps,
    dropout_rate,
    gelu,
    ignore_index,
    label_smoothing,
    loss_terms,
    norm_epsilon,
    padding_idx,
    tied_weights,
    weights_not_counted,
)
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change
from jaxddp.parity.diagnosis.forward.combined import (
    Combination,
    combinations,
    combined,
    counts_of,
    reference_combination,
)
from jaxddp.parity.diagnosis.forward.layout import flattened_axes, kernel_axes, same_padding
from jaxddp.parity.diagnosis.forward.loss_search import LossSearch
from jaxddp.parity.diagnosis.forward.precision import reduced_precision
from jaxddp.parity.diagnosis.forward.reading import Reading, parted_with
from jaxddp.parity.diagnosis.forward.replay import ModelEvidence, ModelStep, Replay
from jaxddp.parity.diagnosis.forward.sites import beginning_in, between, patches_of
from jaxddp.parity.diagnosis.forward.statistics import deviation, fast_variance
from jaxddp.parity.diagnosis.micro_batches import STALE as STALE_PARAMETERS
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.diagnosis.search.fault_search import worst_rank
from jaxddp.parity.diagnosis.search.fit import IMPOSSIBLE, Item, Stages, residual_at
from jaxddp.parity.varied import WAYS

__all__ = ["FLOOR", "ModelEvidence", "ModelStep", "differs", "search_model"]

REPLAYS = 4000  # of a search; measured: up to 1,744 on the scoreboard
# Elements that a loss's calls may take for a search with REPLAYS; 20 to 70 s; measured: 5 to 16 ns an element.
OF_ELEMENTS = 2**20
PER_FAULT = 10  # replays for each fault at least; measured: a pair among 70 faults of a ViT takes 545 in all
OF_A_CALL = 1000  # elements that take as long as a call
AT_LEAST = 150  # replays of a search over the largest model; measured: enough for an eps in a GPT of 124 million
FLOOR = 1e-12  # measured: right hypotheses leave up to 8e-15, wrong ones 8e-12 or more
# Faults that may take a term for 0; not tried where the port computes a term that is 0 for another reason.
MAY_LEAVE_OUT = frozenset({"auxiliary_loss_scaled", "loss_scale", "factor", "operand_left_out"})
OF_ONE_CALL = (
    *(gelu, norm_epsilon, label_smoothing, ignore_index, padding_idx, loss_terms, batch_norm_sync),
    *(weights_not_counted, same_padding, flattened_axes, kernel_axes, fast_variance, deviation, chosen_term, clamps),
)
NEAR, TURNED = WAYS
STALE = CallEdit(Change(STALE_PARAMETERS.kind, STALE_PARAMETERS.what, stale=True), frozenset())


def replays_of(calls: Sequence[Call]) -> int:
    """Return the number of replays of a search, which is smaller for a loss whose calls take more elements.

    >>> from torch import ones
    >>> [replays_of([Call(("sum", 0), sum, (ones(size, size),), {})]) for size in (10, 3000)]
    [4000, 465]
    """
    given = [x for call in calls for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    work = len(calls) * OF_A_CALL + sum(tensor.numel() for tensor in given)
    return max(AT_LEAST, min(REPLAYS, REPLAYS * OF_ELEMENTS // work))


def search_model(
    evidence: ModelEvidence, floor: float = FLOOR, replays: int | None = None
) -> tuple[Ruling, tuple[Item, ...]]:
    """Name the faults that make JAX's local losses and gradients differ from the reference's.

    Args:
        evidence: the reference's loss, and JAX's steps.
        floor: the largest residual that counts as rounding.
        replays: number of replays of the search, after which its results are still confirmed on every step; None:
            as many as the loss's calls allow.

    Returns:
        The ruling; nothing is named and there is no runner-up if nothing differs. And the faults of the first
        hypothesis that it names, with their values, to be planted in further replays.
    """
    subject = _subject(evidence)
    step = _first_that_differs(subject, floor)
    if step is None:
        return Ruling((), None), ()
    rank = worst_rank(subject, step)
    calls = subject.calls(step, rank)
    items, leading = subject.items(step, rank, calls), None
    if evidence.between is not None:
        patches = [item for item in items if isinstance(item, CallEdit) and item.sites]
        leading = [*beginning_in(between(calls, *evidence.between), patches, calls)]
        items = [*leading] if evidence.thrifty else items
    replays = max(replays_of(calls), PER_FAULT * len(items)) if replays is None else replays
    read = evidence.reading if evidence.reading is not None and evidence.reading.program else None
    reading = read if read is not None and _is_finite(subject, read) else None
    hides = reading is not None and parted_with(subject, reading, ())[1].computes_zero
    excluded = MAY_LEAVE_OUT if hides else frozenset()
    items = [item for item in items if excluded.isdisjoint(item.faults)]
    search = LossSearch(subject, evidence, items, (step, (rank,)), floor, replays, leading)
    if reading is not None:
        return search.with_reading(reading)
    ruling, named = search.by_catalogue()
    return ruling if named or read is None else search.located(read, ruling), named


def _is_finite(subject: "LossAndGradients", reading: Reading) -> bool:
    """Return whether the port's losses and gradients are finite; a NaN would be explained by any other NaN."""
    observed = subject.observed(reading.step, (reading.rank,))
    return all(np.isfinite(x).all() for stage in observed.values() for x in stage.values())


def differs(evidence: ModelEvidence) -> bool:
    """Return whether the reference's loss, replayed, differs from JAX's in any step."""
    return _first_that_differs(_subject(evidence), FLOOR) is not None


def _subject(evidence: ModelEvidence) -> "LossAndGradients":
    if evidence.received is not None:
        return ReceivedGradients(evidence)
    return MovedWeights(evidence) if evidence.moved else LossAndGradients(evidence)


def _first_that_differs(subject: "LossAndGradients", floor: float) -> int | None:
    steps = range(subject.steps)
    return next((step for step in steps if residual_at(subject, (step, subject.ranks)) > floor), None)


class LossAndGradients:
    """Local losses and gradients, a `fit.Subject`."""

    def __init__(self, evidence: ModelEvidence):
        self.steps = len(evidence.steps)
        self.ranks = tuple(range(evidence.world_size))
        self._evidence = evidence
        self._replay = Replay(evidence)
        self._reference = reference_combination(evidence.loss_normalization)
        self._counts: dict[int, np.ndarray] = {}

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return JAX's losses and gradients; a stage that the port does not show is left out."""
        taken, chosen = self._evidence.steps[step], self._compared(ranks)
        stages = {"local_gradients": {name: value[chosen] for name, value in taken.local_gradients.items()}}
        return stages | ({"local_loss": {"loss": taken.local_loss[chosen]}} if taken.local_loss.size else {})

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the reference's losses and gradients with faults planted."""
        ranks = self._compared(ranks)
        patches = [item for item in items if isinstance(item, CallEdit)]
        combination = next((item for item in items if isinstance(item, Combination)), self._reference)
        if step not in self._counts:
            self._counts[step] = counts_of(self._replay.run(step, self.ranks))
        recounted = combination.over == "global" and any(patch.change.counts for patch in patches)
        run = self.ranks if combination.shared or recounted else tuple(ranks)
        results = self._replay.run(step, run, patches)
        counts = self._counts[step].copy()
        counts[list(run)] = counts_of(results)
        return combined(combination, results, run, ranks, counts)

    def _compared(self, ranks: Sequence[int]) -> list[int]:
        """Return the given replicas that can be compared; if there are none, all that can be compared."""
        of_all = self._evidence.compared or self.ranks
        return [rank for rank in ranks if rank in of_all] or list(of_all)

    def calls(self, step: int, rank: int, patches: Sequence[CallEdit] = (), reads: bool = False) -> list[Call]:
        """Return the calls of the loss, with faults planted, on a replica's first micro-batch; see `sites.trace`."""
        return self._replay.trace(step, rank, patches, reads)

    def located(
        self, reading: Reading, names: Mapping[int, str], inputs: Mapping[int, str]
    ) -> Iterator[list[LocatedFault]]:
        """Yield the faults on the micro-batch that the port's program computed, the likeliest first.

        None if torch's calls cannot be recorded, as inside of vmap.

        Args:
            reading: the port's program.
            names: id of a parameter or of an entry of the batch -> its name.
            inputs: id of an entry of the batch -> its name.
        """
        graph, step = reading.graph, reading.step
        if graph is None:
            return
        # Parameters that are 1 or 0, as they begin, hide which one is which; others may hide a bound.
        for way, jax in ((NEAR, reading.varied.get(NEAR)), ("", graph)):
            if jax is not None and (jax[jax.end].is_telling or jax[jax.end].is_spoiled):
                with contextlib.suppress(*IMPOSSIBLE):
                    loss = self._replay.graph(step, reading.rank, way)
                    others = [*self._other_inputs(reading, way)]
                    faults, are_all = located_faults(loss, jax, others, names, inputs, self._catalogue(step))
                    if faults:
                        yield faults
                    if faults and are_all:
                        return

    def located_gradients(
        self, reading: Reading, names: Mapping[int, str], inputs: Mapping[int, str]
    ) -> list[LocatedFault]:
        """Return the faults of gradients of equal losses; see `located`."""
        graph = reading.graph
        if graph is None or graph[graph.end].cotangent is None:
            return []
        with contextlib.suppress(*IMPOSSIBLE):
            loss = self._replay.graph(reading.step, reading.rank)
            return gradient_faults(loss, graph, Edits(loss, names, inputs))
        return []

    def _other_inputs(self, reading: Reading, way: str) -> Iterator[OtherInputs]:
        """Yield the other inputs on which the port's program was run, if `way` is that in which parameters vary."""
        step, batches = reading.step, self._evidence.steps[reading.step].micro_batches
        of_ranks = [{name: x.numpy() for name, x in micro_batches[0].items()} for micro_batches in batches]
        if (jax := reading.varied.get(TURNED)) is not None:
            entries = of_ranks[(reading.rank + 1) % len(self.ranks)]
            yield OtherInputs(jax, {**entries, **self._replay.varied(step, TURNED)})
        other_way = "" if way else NEAR
        if (jax := reading.varied.get(NEAR) if other_way else reading.graph) is not None:
            entries = of_ranks[reading.rank]
            yield OtherInputs(jax, {**entries, **self._replay.varied(step, other_way)}, same_batch=True)

    def _catalogue(self, step: int) -> Changes:
        """Return the faults of the catalogue that a call may have."""
        updates = self._evidence.steps[step].updates_buffers

        def changes(call: Call) -> Iterator[Change]:
            of_call = (change for changes_of in OF_ONE_CALL for change in changes_of(call))
            yield from (change for change in of_call if not (change.lockstep or change.counts))
            yield from batch_norm_eval(call, updates(call.module or ""))
            yield from dropout_rate(call, self._evidence.rates)

        return changes

    def items(self, step: int, rank: int, calls: Sequence[Call]) -> list[Item]:
        """Return all faults that apply to the calls of the loss, those with many sites first."""
        changes = [(call, change) for of_call in OF_ONE_CALL for call in calls for change in of_call(call)]
        updates = self._evidence.steps[step].updates_buffers
        changes += [(call, change) for call in calls for change in batch_norm_eval(call, updates(call.module or ""))]
        changes += [(call, change) for call in calls for change in dropout_rate(call, self._evidence.rates)]
        changes += [*tied_weights(calls, self._evidence.module), *reduced_precision(calls)]
        alone = len(self.ranks) == 1
        patches = [patch for patch in patches_of(changes) if not (alone and patch.change.lockstep)]
        patches.sort(key=lambda patch: -len(patch.sites))
        micro_batches = len(self._evidence.steps[step].micro_batches[rank])
        facts = self._evidence.loss_normalization, len(self.ranks), micro_batches, self._evidence.sizes
        return [*combinations(*facts), STALE, *patches]


class MovedWeights(LossAndGradients):
    """Updates that a step makes without an optimizer, in place of gradients."""

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the updates with faults planted."""
        before, patches = self._evidence.steps[step].state, [item for item in items if isinstance(item, CallEdit)]
        after = [result.buffers for result in self._replay.run(step, self._compared(ranks), patches)]
        updates = {name: np.stack([of_rank[name] - before[name] for of_rank in after]) for name in self._evidence.moved}
        return {"local_gradients": updates}

    def calls(self, step: int, rank: int, patches: Sequence[CallEdit] = (), reads: bool = False) -> list[Call]:
        """Return the calls of a step; that which makes the first of the parameters is the last."""
        calls = super().calls(step, rank, patches, reads)
        moved = self._evidence.module.get_parameter(self._evidence.moved[0])
        made = [k for k, call in enumerate(calls) if _is_memory_of(call.result, moved)]
        return [*calls[: made[-1]], *calls[made[-1] + 1 :], calls[made[-1]]] if made else calls

    def items(self, step: int, rank: int, calls: Sequence[Call]) -> list[Item]:
        """Return no faults of the catalogue, which are those of losses."""
        return []


def _is_memory_of(x: Any, parameter: Tensor) -> bool:
    """Return whether a tensor is a parameter, or its `data`."""
    same = isinstance(x, Tensor) and x.shape == parameter.shape
    return same and x.data_ptr() == parameter.data_ptr()


class ReceivedGradients(LossAndGradients):
    """Gradients that the optimizers of a step get, the mean over the replicas, in place of a loss and its gradients."""

    def located(
        self, reading: Reading, names: Mapping[int, str], inputs: Mapping[int, str]
    ) -> Iterator[list[LocatedFault]]:
        """Yield none, as the losses are equal."""
        yield from ()

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the gradients that JAX's optimizers got."""
        return {"local_gradients": self._evidence.steps[step].local_gradients}

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the gradients that torch's optimizers get with faults planted, (1, ...)."""
        patches = [item for item in items if isinstance(item, CallEdit)]
        of_ranks = [result.pieces[0].gradients for result in self._replay.run(step, self.ranks, patches)]
        mean = {name: np.mean([of_rank[name] for of_rank in of_ranks], axis=0)[None] for name in of_ranks[0]}
        return {"local_gradients": mean}

    def items(self, step: int, rank: int, calls: Sequence[Call]) -> list[Item]:
        """Return no faults of the catalogue, which are those of losses."""
        return []
