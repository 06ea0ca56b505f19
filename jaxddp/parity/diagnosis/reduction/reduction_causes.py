"""Causes of a difference between the loss and the optimizer of a port's `jax_step`.

Each hypothesis predicts the step's gradients from the gradients of each micro-batch's loss. These
come from the port's loss, so they are correct whatever the step does with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.parity.compare.patterns import scaled
from jaxddp.parity.compare.residuals import norm
from jaxddp.parity.deviation import Deviation, Statement
from jaxddp.parity.diagnosis.reduction.faults import NO_MEAN, aliases, clip_values, edits, not_averaged, wrong_means
from jaxddp.parity.diagnosis.reduction.recipe import SHOWN, ReductionRecipe, ReductionStep
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.diagnosis.search.fault_search import find_faults
from jaxddp.parity.diagnosis.search.fit import Stages, residual_at
from jaxddp.parity.records import Tensors, relative, stage_norm

__all__ = ["FLOOR", "SHOWN", "ReductionRecipe", "ReductionStep", "explain_reduction"]

FLOOR = 1e-12  # of the stage's norm; measured: right names up to 1e-15
REPLAYS = 4000  # of a search; measured: 1,178 where nothing explains a step of 4 replicas and 3 micro-batches


def explain_reduction(
    steps: Sequence[ReductionStep],
    reference: ReductionRecipe,
    tied: Sequence[str] = (),
    sizes: Mapping[int, str] | None = None,
    floor: float = FLOOR,
) -> Ruling:
    """Name the mistakes in the step's reduction and clipping.

    Args:
        steps: steps that differ, the first of them included.
        reference: the torch side's reduction.
        tied: parameters that have two names.
        sizes: sizes of the batch, in words.
        floor: the largest residual that counts as rounding.

    Returns:
        The ruling; nothing is named if nothing explains what is shown, or nothing differs there.
    """
    subject = ReducedGradients(steps, reference)
    probes = ((step, subject.ranks) for step in range(len(steps)))
    probe = next((probe for probe in probes if residual_at(subject, probe) > floor), None)
    if probe is None:
        return Ruling((), None)
    first = steps[probe[0]]
    items = [*edits(reference, first, tied, sizes or {}), *clip_values(reference, steps)]
    items += [*aliases(reference, first, floor), *not_averaged(reference, first, floor)]
    return find_faults(subject, items, probe, floor, REPLAYS)[0]


@dataclass(frozen=True)
class ReducedGradients:
    """Gradients that a step shows, a `fit.Subject`.

    Attributes:
        of_steps: the steps.
        reference: the torch side's reduction.
    """

    of_steps: Sequence[ReductionStep]
    reference: ReductionRecipe

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.of_steps)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All replicas."""
        return tuple(range(len(self.of_steps[0].counts)))

    def observed(self, step: int, ranks: Sequence[int]) -> Stages:
        """Return the gradients that JAX's step shows."""
        return _of_ranks(self.of_steps[step].shown, ranks)

    def predicted(self, step: int, ranks: Sequence[int], items: Sequence[Any]) -> Stages:
        """Return the reference's gradients with faults planted."""
        recipe = self.reference
        for item in items:
            recipe = item.change(recipe, item.times)
        with np.errstate(all="ignore"):  # wild factors are tried on the way
            return _of_ranks(recipe.predict(self.of_steps[step]), ranks)


def _of_ranks(stages: Stages, ranks: Sequence[int]) -> Stages:
    return {stage: {name: value[list(ranks)] for name, value in of.items()} for stage, of in stages.items()}


Received = tuple[Tensors, Tensors]  # JAX's, (W, ...), and torch's


def explain_received(steps: Sequence[Received], sizes: Mapping[int, str], floor: float = FLOOR) -> Ruling:
    """Name the mistake in the reduction that explains all tensors that differ.

    Args:
        steps: per step, the gradients that JAX's optimizers got, (W, ...), and those that torch's got, (...).
        sizes: sizes of the batch, in words.
        floor: the largest residual that counts as rounding.

    >>> import numpy as np
    >>> torch = {"weight": np.array([1.0, 3.0])}
    >>> jax = {"weight": 32 * np.tile(torch["weight"], (2, 1))}
    >>> explain_received([(jax, torch)], {32: "the batch"}).named[0].faults
    ('loss_scale',)
    """
    if (
        _tried(Deviation("", Statement("")), steps, lambda jax, torch: jax - torch).residual <= floor
    ):  # another difference
        return Ruling((), None)
    world_size = len(next(iter(steps[0][0].values())))
    of_replicas = _hypotheses(steps, world_size) if world_size > 1 else ()
    return decide([*of_replicas, *_sums(steps, {size: sizes[size] for size in sizes if size != world_size})], floor)


def _sums(steps: Sequence[Received], sizes: Mapping[int, str]) -> Iterator[Hypothesis]:
    for factor in (factor for size in sizes for factor in (float(size), 1 / size)):
        times = scaled("gradients", factor, sizes)
        yield _tried(times, steps, lambda jax, torch, factor=factor: jax - factor * torch)


def _hypotheses(steps: Sequence[Received], world_size: int) -> Iterator[Hypothesis]:
    for mean, factor in wrong_means(world_size):
        yield _tried(mean, steps, lambda jax, torch, factor=factor: jax - factor * torch)
    yield _tried(NO_MEAN, steps, lambda jax, torch: jax.mean(0) - torch)


def _tried(deviation: Deviation, steps: Sequence[Received], left: Callable[..., object]) -> Hypothesis:
    """Return the hypothesis that each tensor has the fault or not, whichever leaves less."""
    worst = 0.0
    for jax, torch in steps:
        scales = stage_norm(torch), stage_norm(jax)
        for name, value in jax.items():
            expected = torch.get(name, 0.0 * value[0])
            own = min(norm(value - expected), norm(left(value, expected)))  # type: ignore[arg-type]
            worst = max(worst, relative(own, *scales))
    return Hypothesis((deviation,), worst)
